"""What a request is drafted by, moved over and ended with: values beside ``runtime.core.request``."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engines.sampling.base import TokenLogprobs, Verdict
from outrider.runtime.core.params import EmittedToken, FinishReason, Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a completion ended well, with the stop that did it and the text still held back."""

    reason: FinishReason
    stop: str | int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a request is drafted for, with defaults and availability resolved.

    Attributes:
        drafter: registry name.
        gamma: draft tokens per step, at most.
        off_reason: why speculation is off or degraded; None when it is on as asked.
        is_adaptive: whether each step's draft tokens are chosen by what they are expected to gain.
        verifies_block: whether sampled drafts are judged as whole blocks.
        fixed_gamma: draft tokens per step while none can be chosen; None for ``gamma``.
        chosen: what was chosen in place of "auto"; empty where the drafter was asked for.
    """

    drafter: str
    gamma: int
    off_reason: str | None
    is_adaptive: bool = False
    verifies_block: bool = False
    fixed_gamma: int | None = None
    chosen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What a request was moved over by one verification.

    Attributes:
        draft_tokens: the whole draft; of a tree the chain that was tried.
        verdict: its judgement.
        num_drafted: tokens of the whole tree; None for a chain.
        run: at least one token that was appended.
        is_over: whether the last of them ended the request.
        is_prompt: whether it is the first token, out of the pass over the prompt's end.
    """

    draft_tokens: tuple[int, ...]
    verdict: Verdict
    num_drafted: int | None
    run: tuple[int, ...]
    is_over: bool
    is_prompt: bool


def emitted(
    tokens: tuple[int, ...], verdict: Verdict, num_drafted: int
) -> tuple[EmittedToken, ...]:
    """Kept tokens of a verification as they are told.

    Args:
        tokens: at least one.
        verdict: that kept them.
        num_drafted: tokens of the draft.
    """
    was_rejected = verdict.num_accepted < num_drafted
    last = Provenance.RECOVERED if was_rejected else Provenance.BONUS
    logprobs: tuple[TokenLogprobs | None, ...] = verdict.logprobs or (None,) * len(tokens)
    accepted, num_accepted = Provenance.ACCEPTED, verdict.num_accepted
    return tuple(
        [
            EmittedToken(
                token=token,
                provenance=accepted if index < num_accepted else last,
                logprobs=logprobs[index],
            )
            for index, token in enumerate(tokens)
        ]
    )
