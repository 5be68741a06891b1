"""The table of the fields of a generation request: default, bounds, and what each may stand beside.

Names and types are those of ``outrider.v1.GenerateRequest``; the parts of ``sampling`` and ``speculation`` have their
own rows. A new sampling parameter is a field of the wire, a row here, and a parameter of ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf.message import Message
from outrider.runtime.core.checks.rules import REQUEST_ID, REQUEST_ID_RULE
from outrider.runtime.core.drafting import MAX_BRANCHING
from outrider.runtime.core.tenant import PRIORITIES
from outrider.runtime.serving.requests.bounds import (
    Biases,
    Bound,
    Entries,
    Ids,
    Pattern,
    Range,
    Text,
    Texts,
)
from outrider.v1 import inference_pb2 as wire

# Below this, logits divided by the number leave float32; vLLM clamps temperature at the same place.
SMALLEST_DIVISOR = 0.01
MAX_SEED = 2**64 - 1
# Models ask for 2 to 4; a bound, since every position compares that many tokens.
MAX_NGRAM_SIZE = 10
MAX_SALT = 128
# Scores are sums / length ** penalty, and a length at most a few thousand: no power overflows.
LARGEST_PENALTY = 10.0
NOT_SERVED = "is not supported by this server; leave it out"
NO_DRAFTED_BEAMS = "beam searches are not drafted any more; leave it out"
MAX_TOKENS_RULE = "must be in [1, {high}], or 0 with prompt_logprobs or echo"


class Search(Enum):
    """What a field has to do with a beam search.

    A search ranks texts by the model's own probabilities and draws nothing: what shapes a draw is refused with it.
    Bans (allowed_token_ids, bad_words, min_tokens, no_repeat_ngram_size) go along: what they ban is no continuation.
    """

    ANY = "with and without one"
    ONLY = "with one alone"
    NEVER = "without one alone"
    UNREPORTED = "without one alone: what happened step by step says nothing of the hypotheses that were left"


class Models(Enum):
    """Which models have a field."""

    ALL = "all"
    ENCODER_DECODER = "those with an encoder"
    DECODER_ONLY = "those without an encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a request.

    Attributes:
        default: what a request that leaves it out asks for, and the only value that it may have where it is refused;
            None: nothing, or what the server says.
        bound: of its values; None where ``checks`` has rules of its own, or the type says it all.
        search: whether it goes with a beam search.
        models: which have it.
        refusal: rule that every value but the default breaks; empty where others are served.
    """

    default: Any = None
    bound: Bound | None = None
    search: Search = Search.ANY
    models: Models = Models.ALL
    refusal: str = ""


def _least(name: str) -> Range:
    """Return the range of a count that limit ``name`` and the vocabulary bound."""
    return Range(0, lambda rules: min(getattr(rules.limits, name), rules.model.vocab_size))


_TEXT = Text(lambda rules: rules.limits.max_prompt_bytes)
_GRAMMAR = Field(default="", bound=Text(lambda rules: rules.limits.max_grammar_bytes))
_OF_SOURCES = Models.ENCODER_DECODER
_SHAPES_DRAWS = Search.NEVER

FIELDS: Mapping[str, Field] = {
    "request_id": Field(default="", bound=Pattern(REQUEST_ID, REQUEST_ID_RULE)),
    # The prompt is checked as a whole: see ``runtime.serving.requests.checks``.
    "text": Field(),
    "tokens": Field(),
    "chat": Field(),
    "model": Field(default=""),
    "max_tokens": Field(
        bound=Range(0, lambda rules: rules.limits.max_tokens, rule=MAX_TOKENS_RULE)
    ),
    "stop": Field(
        default=(),
        bound=Texts(
            lambda rules: rules.limits.max_stop_strings, lambda rules: rules.limits.max_stop_bytes
        ),
        search=_SHAPES_DRAWS,
    ),
    "stop_token_ids": Field(default=(), bound=Ids(lambda rules: rules.limits.max_stop_token_ids)),
    "include_stop_str_in_output": Field(default=False),
    "ignore_eos": Field(default=False),
    "logprobs": Field(bound=_least("max_logprobs"), search=_SHAPES_DRAWS),
    "skip_special_tokens": Field(default=True),
    "return_provenance": Field(default=False, search=Search.UNREPORTED),
    "return_trace": Field(default=False, search=Search.UNREPORTED),
    "n": Field(default=1),
    "best_of": Field(refusal=NOT_SERVED),
    "prompt_logprobs": Field(
        bound=_least("max_prompt_logprobs"), search=_SHAPES_DRAWS, models=Models.DECODER_ONLY
    ),
    "echo": Field(default=False, search=_SHAPES_DRAWS, models=Models.DECODER_ONLY),
    "regex": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "grammar": _GRAMMAR,
    "disable_any_whitespace": Field(default=False),
    "adapter": Field(default="", refusal=NOT_SERVED),
    "num_beams": Field(
        default=1, bound=Range(1, lambda rules: min(rules.limits.max_beams, rules.model.max_beams))
    ),
    "length_penalty": Field(
        default=1.0, bound=Range(-LARGEST_PENALTY, LARGEST_PENALTY), search=Search.ONLY
    ),
    "early_stopping": Field(default=False, search=Search.ONLY),
    "exhaustive_search": Field(default=False, search=Search.ONLY),
    "source_language": Field(default="", models=_OF_SOURCES),
    "target_language": Field(default="", models=_OF_SOURCES),
    "answer_prefix": Field(default="", bound=_TEXT, models=_OF_SOURCES),
    "answer_prefix_tokens": Field(models=_OF_SOURCES),
    "cache_salt": Field(default=""),
    "add_special_tokens": Field(),
    "priority": Field(default=0, bound=Range(*PRIORITIES)),
    # With a beam search 0, and nothing else.
    "sampling.temperature": Field(default=1.0, bound=Range(SMALLEST_DIVISOR, 2, allows_zero=True)),
    "sampling.top_k": Field(
        default=0, bound=Range(0, lambda rules: rules.model.vocab_size - 1), search=_SHAPES_DRAWS
    ),
    "sampling.top_p": Field(default=1.0, bound=Range(0, 1, is_open=True), search=_SHAPES_DRAWS),
    "sampling.min_p": Field(default=0.0, bound=Range(0.0, 1.0), search=_SHAPES_DRAWS),
    "sampling.repetition_penalty": Field(
        default=1.0, bound=Range(SMALLEST_DIVISOR, 2.0), search=_SHAPES_DRAWS
    ),
    "sampling.presence_penalty": Field(default=0.0, bound=Range(-2.0, 2.0), search=_SHAPES_DRAWS),
    "sampling.frequency_penalty": Field(default=0.0, bound=Range(-2.0, 2.0), search=_SHAPES_DRAWS),
    "sampling.logit_bias": Field(
        default=(),
        bound=Biases(lambda rules: rules.limits.max_logit_bias, 100.0),
        search=_SHAPES_DRAWS,
    ),
    "sampling.allowed_token_ids": Field(
        default=(), bound=Ids(lambda rules: rules.limits.max_allowed_token_ids)
    ),
    "sampling.bad_words": Field(
        default=(),
        bound=Texts(
            lambda rules: rules.limits.max_bad_words, lambda rules: rules.limits.max_stop_bytes
        ),
    ),
    "sampling.min_tokens": Field(default=0, bound=Range(0, lambda rules: rules.limits.max_tokens)),
    "sampling.seed": Field(bound=Range(0, MAX_SEED)),
    "sampling.no_repeat_ngram_size": Field(default=0, bound=Range(0, MAX_NGRAM_SIZE)),
    "sampling.top_n_sigma": Field(default=0.0, bound=Range(0.0, 100.0), search=_SHAPES_DRAWS),
    # What one of these needs of the others is in ``runtime.core.drafting``.
    "speculation.enabled": Field(default=True),
    "speculation.drafter": Field(default=""),
    "speculation.gamma": Field(bound=Range(0, lambda rules: rules.model.max_gamma)),
    "speculation.mode": Field(default=wire.EXACTNESS_MODE_MAX_ACCEPT),
    "speculation.lenience": Field(default=1.0),
    "speculation.phrase_length": Field(),
    "speculation.num_phrases": Field(),
    "speculation.window": Field(),
    "speculation.reference": Field(default=""),
    "speculation.adaptive": Field(),
    "speculation.block_verification": Field(),
    "speculation.beam_width": Field(default=0, refusal=NO_DRAFTED_BEAMS),
    "speculation.branching": Field(default=(), bound=Entries(lambda _: MAX_BRANCHING)),
}
"""By path."""
NESTED = ("sampling", "speculation")
"""Fields whose parts have rows of their own."""


def given_fields(request: Message, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field that a request sets; one without presence is not set at its default."""
    for field, value in request.ListFields():
        if field.name in NESTED:
            yield from given_fields(value, f"{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
