"""Options that change what kind of answer is given: refused where they cannot be had.

A beam search ranks texts by the model's own probabilities and draws nothing, so whatever shapes a draw is refused with
it by name. Bans (allowed_token_ids, bad_words, min_tokens, no_repeat_ngram_size) go along: what they ban is no
continuation. The rules that many fields share are here too; each refusal names the field and the rule, never the value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.core.params import BeamParams, ChatParams, SpeculationParams

# The caller may leave these out or say the only value that is served; of best_of that is n, which dialects leave out.
ONLY_VALUES: Mapping[str, object] = {
    "adapter": "",
    "best_of": None,
}
# Likewise, unless a beam search is asked for.
ONLY_WITH_BEAMS: Mapping[str, object] = {
    "length_penalty": 1.0,
    "early_stopping": False,
    "exhaustive_search": False,
    "speculation.beam_width": 0,
}
# Likewise, if one is: what happened step by step says nothing of the hypotheses that were left.
NOT_WITH_BEAMS: Mapping[str, object] = {"return_provenance": False, "return_trace": False}
# Likewise, unless the model has an encoder.
ONLY_WITH_ENCODER: Mapping[str, object] = {
    "source_language": "",
    "target_language": "",
    "answer_prefix": "",
    "answer_prefix_tokens": None,
}
ALL_VALUES = {**ONLY_VALUES, **ONLY_WITH_BEAMS, **NOT_WITH_BEAMS, **ONLY_WITH_ENCODER}
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Scores are sums / length ** penalty, and a length at most a few thousand: no power overflows.
LARGEST_PENALTY = 10.0
MAX_ROLE_BYTES = 64


def check_options(options: Mapping[str, object], *, search: str, has_encoder: bool) -> None:
    """Raise UnsupportedOption, naming it, for an option that is not served, or not with this answer or model.

    ``search`` is what a refusal calls the beam search; empty where there is none.
    """
    for name, value in options.items():
        if value == ALL_VALUES[name]:
            continue
        if name in ONLY_VALUES:
            raise UnsupportedOption(name, "is not supported by this server; leave it out")
        if name in ONLY_WITH_BEAMS and not search:
            raise UnsupportedOption(name, "needs num_beams above 1")
        if name in NOT_WITH_BEAMS and search:
            raise UnsupportedOption(name, f"must be left out with {search}")
        if name in ONLY_WITH_ENCODER and not has_encoder:
            raise UnsupportedOption(name, "needs a model with an encoder; leave it out")


def check_beams(beams: BeamParams, most: int, search: str) -> None:
    """Raise RequestError, naming the field, for a search that no server of ``most`` slots for it could run.

    ``search`` is what a refusal calls the search.
    """
    check_range("num_beams", beams.num_beams, 1, most)
    check_range("n", beams.num_results, 1, beams.num_beams, f"must be in {{}} with {search}")
    if beams.width:
        check_range("speculation.beam_width", beams.width, beams.num_beams, most)
    if beams.stops_early and beams.is_exhaustive:
        raise RequestError("exhaustive_search", "must be left out with early_stopping")
    check_range("length_penalty", beams.length_penalty, -LARGEST_PENALTY, LARGEST_PENALTY)


def check_ranked(
    params: SamplingParams,
    speculation: SpeculationParams,
    given: Mapping[str, bool],
    search: str,
) -> None:
    """Refuse what a beam search would have to ignore, or could not do exactly.

    Args:
        params: of the request; temperature 0.
        speculation: of the request.
        given: further options that a search does not have, and whether they were given.
        search: what a refusal calls the search.

    Raises:
        RequestError: naming the field.
    """
    if params.temperature != 0.0:
        raise RequestError("sampling.temperature", f"must be 0 or left out with {search}")
    plain = replace(
        SamplingParams(temperature=0.0),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        min_tokens=params.min_tokens,
        end_token_ids=params.end_token_ids,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
    )
    for name in SamplingParams.__dataclass_fields__:
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(f"sampling.{name}", f"must be left out with {search}")
    for name, is_given in given.items():
        if is_given:
            raise RequestError(name, f"must be left out with {search}")
    if speculation.is_adaptive:
        raise RequestError("speculation.adaptive", f"must be left out with {search}")
    if speculation.mode is ExactnessMode.LENIENT:
        raise RequestError("speculation.mode", f"must not be LENIENT with {search}")
    if speculation.drafter not in (None, "model", "none"):
        raise RequestError("speculation.drafter", f"must be model or none with {search}")


def check_chat(
    chat: ChatParams,
    *,
    max_messages: int,
    max_bytes: int,
    templates: Sequence[str],
    has_encoder: bool,
) -> None:
    """Refuse a conversation that is not served here, or is too large to be looked at.

    Args:
        chat: from the request.
        max_messages: at most.
        max_bytes: of all its texts together.
        templates: names of the bundle's templates.
        has_encoder: whether the model reads sources.

    Raises:
        RequestError: naming the field.
    """
    if has_encoder:
        raise UnsupportedOption("chat", "needs a model without an encoder; send the source as text")
    if not templates:
        raise UnsupportedOption(
            "chat", "needs a bundle with a chat template; send the prompt as text"
        )
    check_count("chat.messages", chat.messages, max_messages)
    if not chat.messages:
        raise RequestError("chat.messages", "must have at least one message")
    if chat.num_bytes > max_bytes:
        raise RequestError("chat", f"must be at most {max_bytes} bytes of UTF-8 in all its texts")
    for one in chat.messages:
        if not 1 <= len(one.role.encode()) <= MAX_ROLE_BYTES:
            rule = f"must be 1..{MAX_ROLE_BYTES} bytes of UTF-8"
            raise RequestError("chat.messages.role", rule)
    if chat.template and chat.template not in templates:
        raise RequestError("chat.template", f"must be one of {', '.join(templates)}")
    if chat.continues_final and chat.adds_generation_prompt:
        rule = "must be false or left out with continue_final_message"
        raise RequestError("chat.add_generation_prompt", rule)


def check_abort_ids(request_ids: Sequence[str], most: int) -> None:
    """Refuse an abort without ids, with more than ``most`` or with impossible ones."""
    check_range("request_ids", len(request_ids), 1, most, "number must be in {}")
    if not all(REQUEST_ID.fullmatch(request_id) for request_id in request_ids):
        raise RequestError("request_ids", "each must be 1..128 characters of [A-Za-z0-9._:-]")


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Refuse a text too long to be tokenised (tokenizers can be super-linear)."""
    # Characters are at least one byte each: the cheap test first.
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise RequestError(name, f"must be at most {max_bytes} bytes of UTF-8")


def check_texts(name: str, texts: Collection[str], most: int, max_bytes: int) -> None:
    """Refuse too many texts, an empty one, or one of more than ``max_bytes`` bytes of UTF-8."""
    check_count(name, texts, most)
    for text in texts:
        if not 1 <= len(text.encode()) <= max_bytes:
            raise RequestError(name, f"each must be 1..{max_bytes} bytes of UTF-8")


def check_count(name: str, values: Collection[object], most: int) -> None:
    """Refuse more than ``most`` entries."""
    if len(values) > most:
        raise RequestError(name, f"must have at most {most} entries")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(name, f"token ids must be in [0, {vocab_size})")


def check_range(
    name: str, value: float, low: float, high: float, rule: str = "must be in {}"
) -> None:
    """Refuse a value outside [low, high]; NaN compares false with everything, so it is refused too."""
    if not low <= value <= high:
        raise RequestError(name, rule.format(f"[{low}, {high}]"))
