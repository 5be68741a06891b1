"""A request between its bytes and the queue: as it arrived, and what the service adds when it lets it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import BeamParams, ChatParams, GrammarParams, SpeculationParams
from outrider.runtime.core.tenant import NO_RULES, TenantRules


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFields:
    """A request as it arrived, defaults filled in; nothing is checked yet.

    Attributes:
        text: prompt as text, or None when it came as ``tokens`` or ``chat``.
        max_tokens: None takes the default.
        default_max_tokens: the dialect's default, where the limits and the context leave room for it; None takes the
            server's.
        beams: None for one completion, which is drawn or greedy.
        options: values of the options in ``runtime.core.checks.options``, by name.
        source_language: code; empty for the model's default.
        target_language: likewise.
        answer_prefix: what the answer begins with, as text, unless it came as ``answer_prefix_tokens``.
        default_min_tokens: as ``params.min_tokens``, of a server's default: less where max_tokens is.
        has_default_beams: whether the beam search is a server's default, and the request did not ask for it.
        grammar: as in ``RequestSpec``, and likewise below.
        cache_salt: makes a scope of cached prefixes of its own within the tenant.
        priority: as in ``RequestSpec``.
        num_samples: completions of the prompt, drawn apart; 1 with a beam search.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: ChatParams | None = None
    request_id: str = ""
    model: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    num_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    beams: BeamParams | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    source_language: str = ""
    target_language: str = ""
    answer_prefix: str = ""
    answer_prefix_tokens: tuple[int, ...] | None = None
    default_min_tokens: int = 0
    has_default_beams: bool = False
    grammar: GrammarParams | None = None
    num_prompt_logprobs: int | None = None
    echoes_prompt: bool = False
    cache_salt: str = ""
    priority: int = 0
    num_samples: int = 1

    @property
    def search_name(self) -> str:
        """What refusals call the beam search; empty where there is none."""
        if self.beams is None:
            return ""
        default = " (the server's default: say num_beams 1)" if self.has_default_beams else ""
        return f"num_beams{default}"

    @property
    def answer_prefix_name(self) -> str:
        """Path of the field that the answer prefix came in."""
        return "answer_prefix" if self.answer_prefix_tokens is None else "answer_prefix_tokens.ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the service adds to a request when it lets it in.

    Attributes:
        prompt_tokens: the prompt, tokenised; with an encoder, the model's own decoder prefix.
        bad_words: token sequences of the bad words.
        deadline_s: on the worker's monotonic clock.
        tenant: as ``runtime.core.tenant`` reads it.
        is_known: likewise.
        source_tokens: the prompt, tokenised, where the model has an encoder.
        answer_prefix: the request's own part of the decoder prefix, tokenised.
        cache_scope: name of those whom it shares cached prefixes with, but for its salt; None shares nothing.
        rules: the tenant's share.
    """

    internal_id: str
    request_id: str
    prompt_tokens: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seed: int
    deadline_s: float | None
    tenant: str = ""
    is_known: bool = True
    source_tokens: tuple[int, ...] = ()
    answer_prefix: tuple[int, ...] = ()
    cache_scope: str | None = None
    rules: TenantRules = NO_RULES
