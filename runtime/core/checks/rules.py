"""Rules that many fields share, and those of conversations; a refusal names field and rule, never the value."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from outrider.runtime.core.checks.limits import ServedModel
from outrider.runtime.core.errors import ContextTooLong, RequestError, UnsupportedOption
from outrider.runtime.core.params import ChatParams

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_RULE = "must be 1..128 characters of [A-Za-z0-9._:-]"
MAX_ROLE_BYTES = 64


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
        raise RequestError("request_ids", f"each {REQUEST_ID_RULE}")


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


def check_prefix_size(name: str, num_given: int, num_own: int, model: ServedModel) -> None:
    """Refuse an answer prefix that leaves no room for a token behind ``num_own`` tokens of the model's."""
    limit = model.max_context - 1 - num_own
    if num_given > limit:
        rule = f"must be at most {limit} tokens behind the decoder prefix"
        raise ContextTooLong(name, rule, limit=limit, given=num_given)


def check_prompt_size(num_prompt: int, model: ServedModel) -> None:
    """Refuse a prompt that leaves no room for a token, or a source that is too long to be read."""
    limit, name = model.max_context - 1, ""
    if model.max_source:
        limit, name = model.max_source, ", max_source_tokens of this server"
    if num_prompt > limit:
        rule = f"must be at most {limit} tokens{name}"
        raise ContextTooLong("prompt", rule, limit=limit, given=num_prompt)
