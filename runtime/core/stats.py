"""Acceptance figures of one request, by counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.events import SpeculationDisabledReason, SpeculationReport


class SpeculationStats:
    """Counts rounds and builds a ``SpeculationReport``.

    A round is a pass of the target that decodes, with drafts or without. A first token that came out
    of the pass over the prompt belongs to none: no draft was possible there, and counted as a round it
    would pass for one that drafted badly.

    alpha_hat is the maximum-likelihood estimate for the truncated geometric law of the number
    accepted A: sum of A over sum of min(A + 1, gamma) (Leviathan et al. 2023, arXiv:2211.17192,
    section 3.1 defines alpha; the estimator counts the positions that were reached).
    """

    def __init__(self, *, max_gamma: int) -> None:
        # Rounds by tokens drafted and by tokens that count: cheaper to keep than counts by position.
        self._rounds_by_gamma = [0] * (max_gamma + 1)
        self._rounds_by_kept = [0] * (max_gamma + 1)
        self._num_trials = 0
        self.num_steps = 0
        self.num_emitted = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_fallbacks = 0
        self.num_off = 0
        self.num_forced = 0

    def record(
        self,
        *,
        gamma: int,
        num_accepted: int,
        num_emitted: int,
        num_fallbacks: int,
        num_drafted: int | None = None,
    ) -> int:
        """Count one target pass.

        Args:
            gamma: tokens drafted for it; of a tree the longest chain that was tried.
            num_accepted: A, as judged.
            num_emitted: tokens kept after the cut, at most A + 1; what was cut off counts nowhere.
            num_fallbacks: residuals of zero mass.
            num_drafted: tokens of the whole draft where it is a tree; None for gamma.

        Returns:
            The accepted tokens that count.
        """
        kept = min(num_accepted, num_emitted)
        was_cut = num_emitted <= num_accepted
        self.num_steps += 1
        self.num_emitted += num_emitted
        self.num_drafted += gamma if num_drafted is None else num_drafted
        self.num_accepted += kept
        self.num_fallbacks += num_fallbacks
        self._num_trials += kept if was_cut else min(num_accepted + 1, gamma)
        self._rounds_by_gamma[gamma] += 1
        self._rounds_by_kept[kept] += 1
        return kept

    def report(
        self,
        *,
        drafter: str,
        mode: ExactnessMode,
        lenience: float,
        off_reason: SpeculationDisabledReason | None,
    ) -> SpeculationReport:
        """The figures so far; positions that were never drafted are left out."""
        drafted = [count for count in _by_position(self._rounds_by_gamma) if count]
        accepted = _by_position(self._rounds_by_kept)[: len(drafted)]
        is_on = off_reason is None and (self.num_off == 0 or self.num_drafted > 0)
        if off_reason is None and self.num_off > 0:
            off_reason = SpeculationDisabledReason.NO_EXPECTED_GAIN
        return SpeculationReport(
            is_on=is_on,
            off_reason=off_reason,
            drafter=drafter,
            mode=mode,
            lenience=lenience,
            num_steps=self.num_steps,
            num_emitted=self.num_emitted,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            alpha_hat=_ratio(self.num_accepted, self._num_trials),
            draft_utilization=_ratio(self.num_accepted, self.num_drafted),
            tokens_per_step=_ratio(self.num_emitted, self.num_steps),
            accepted_by_position=tuple(accepted),
            drafted_by_position=tuple(drafted),
            num_fallbacks=self.num_fallbacks,
            num_off=self.num_off,
            num_forced=self.num_forced,
        )


def _by_position(rounds: Sequence[int]) -> list[int]:
    """Entry i: rounds of at least i + 1 tokens, of ``rounds`` by their number of tokens."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterVerdict:
    """Whether a drafter pays at the present load.

    Attributes:
        alpha: share of its draft tokens that was kept of late, over positions that were reached; None for too few.
        least_alpha: share from which on it is faster than plain decoding; None where none is enough.
        num_rows: rows that decode together, at which that holds.
    """

    drafter: str
    alpha: float | None
    least_alpha: float | None
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """What the controller's choices brought in recent traffic.

    Attributes:
        speed_up: tokens per second over those of plain decoding; None before the first step.
        regret: share of the best fixed gamma's tokens per second that was missed, at least 0; None
            before the first step.
        best_fixed_gamma: that gamma.
        num_steps_on: decoding steps with drafts, since the start.
        num_steps_off: decoding steps without, probes included, since the start.
        num_probes: steps without drafts that measured what drafts gain, since the start.
        cost_share: of the decoding time, spent on choosing.
        verdicts: of the default drafter, and of those that requests had of late.
    """

    speed_up: float | None
    regret: float | None
    best_fixed_gamma: int
    num_steps_on: int
    num_steps_off: int
    num_probes: int
    cost_share: float = 0.0
    verdicts: tuple[DrafterVerdict, ...] = ()
