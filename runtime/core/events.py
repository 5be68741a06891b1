"""What a request is told: the events that the worker gives the service, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from outrider.engines.base import step_value
from outrider.engines.sampling.base import ExactnessMode, TokenLogprobs

MOST_PROMPT_TOKENS = 1024
"""Tokens of a scored prompt in one message: with all their alternatives 100 KiB, which take the event loop 5 ms."""


class FinishReason(StrEnum):
    """Why a completion ended well."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class Provenance(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    FORCED = "forced"


class SpeculationDisabledReason(StrEnum):
    """Why speculation was off or degraded for a request, or a part of it.

    DISABLED: asked for, by request or server. NO_DRAFT: this server lacks the drafter. DEGRADED: the drafter failed.
    DRAFTER_PAUSED: it failed too often and is left alone for a while. NO_EXPECTED_GAIN: some passes were not worth a
    draft.
    """

    DISABLED = "DISABLED"
    NO_DRAFT = "NO_DRAFT"
    DEGRADED = "DEGRADED"
    DRAFTER_PAUSED = "DRAFTER_PAUSED"
    NO_EXPECTED_GAIN = "NO_EXPECTED_GAIN"


@step_value
class PromptToken:
    """One token of a prompt that is scored; the first one has no log-probability."""

    token: int
    logprobs: TokenLogprobs | None


def pieces_of(prompt: tuple[PromptToken, ...]) -> Sequence[tuple[PromptToken, ...]]:
    """Return a scored prompt in pieces of at most ``MOST_PROMPT_TOKENS``, at least one."""
    size = MOST_PROMPT_TOKENS
    return [prompt[start : start + size] for start in range(0, max(1, len(prompt)), size)]


@step_value
class EmittedToken:
    """One token of the answer."""

    token: int
    provenance: Provenance
    logprobs: TokenLogprobs | None = None


@step_value
class StepTrace:
    """One target pass of a request, for ``--trace``: what was drafted and how it was judged.

    Attributes:
        draft_tokens: as drafted, also behind the end of the answer; of a tree the path that was kept and, if any, the
            first child that was rejected behind it.
        num_accepted: leading draft tokens that the answer has.
        next_token: what the target added; None where the answer ended before it.
        is_prompt: whether the pass read the prompt's end, had nothing to verify, and counts as no target pass.
        forced: what the constraint forced behind ``next_token``; the next pass reads it.
    """

    draft_tokens: tuple[int, ...]
    num_accepted: int
    next_token: int | None
    is_prompt: bool = False
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """Acceptance figures of one request.

    Attributes:
        alpha_hat: accepted / trials reached, an estimate of the paper's alpha unless whole blocks
            were judged; None without trials.
        draft_utilization: accepted / drafted (not alpha); None without drafts.
        num_steps: target passes that verified; one that read a prompt and gave the first token is none.
        num_emitted: tokens that they emitted: the answer's, less a first token that came with the prompt, and less
            ``num_forced``.
        tokens_per_step: mean emitted tokens per target pass; None without passes.
        accepted_by_position: entry i counts rounds whose draft token i was accepted.
        drafted_by_position: entry i counts rounds that drafted at least i + 1 tokens.
        off_reason: why speculation was off or degraded for (part of) the request; None when it was on throughout.
        num_off: target passes without a draft because none was expected to gain anything.
        verifies_block: whether sampled drafts were judged as whole blocks.
        num_forced: tokens that the constraint forced.
    """

    is_on: bool
    off_reason: SpeculationDisabledReason | None
    drafter: str
    mode: ExactnessMode
    lenience: float
    num_steps: int
    num_emitted: int
    num_drafted: int
    num_accepted: int
    alpha_hat: float | None
    draft_utilization: float | None
    tokens_per_step: float | None
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    num_fallbacks: int
    num_off: int = 0
    verifies_block: bool = False
    num_forced: int = 0


@step_value
class Progressed:
    """Event: a step emitted tokens, or none where none were asked for.

    Attributes:
        text: what became safe to show, possibly empty.
        prompt: the whole prompt, of a request's first event where its log-probabilities were asked for; else empty.
    """

    tokens: tuple[EmittedToken, ...]
    text: str
    trace: StepTrace
    prompt: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamAnswer:
    """One completion that a beam search found.

    Attributes:
        tokens: the stop token included.
        log_prob: sum of the tokens' log-probabilities, natural logarithm.
        score: what completions are ranked by.
        stop: the stop token; None where the length ended it.
    """

    tokens: tuple[int, ...]
    text: str
    log_prob: float
    score: float
    reason: FinishReason
    stop: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long the parts of a request's life took, seconds; a part that it did not reach took none.

    Attributes:
        queued_s: from its submission to its slot.
        prefill_s: from there to the end of the step that gave its first token; of a beam search, all its answer.
        decode_s: from there to its end.
    """

    queued_s: float
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Terminal event: the completion ended well.

    Attributes:
        text: the held-back rest, to append.
        beams: what a beam search found, best first; reason, stop and text are then those of the best.
        num_cached: leading tokens of the prompt that were not computed again.
        times: on the worker; None where it did not take them.
    """

    reason: FinishReason
    stop: str | int | None
    text: str
    num_prompt: int
    num_output: int
    report: SpeculationReport
    beams: tuple[BeamAnswer, ...] = ()
    num_cached: int = 0
    times: Times | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Terminal event: the request ended with an error of ``runtime.core.errors``; ``times`` as of ``Finished``."""

    error: Exception
    num_output: int
    times: Times | None = None


Event = Progressed | Finished | Failed
