"""What speculation brought: realised speed-up, and regret against the best fixed gamma.

Sums fade, so that both speak of recent traffic. The speed-up compares the tokens per second of all
steps with those of the same rows without drafts, at the plain step time that probes keep measured.
The regret compares with the best gamma that every row might have had all the time, at the acceptance
and the times known in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.forecast import Forecast

FADING = 0.999
Served = tuple[float, int, int, bool, bool]
"""Of a step: seconds, emitted tokens, rows, whether drafts were verified, and whether it was a probe."""
MOST_UNSEEN = 64
"""Decisions whose steps wait to be held against fixed gammas at most."""


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
    """

    speed_up: float | None
    regret: float | None
    best_fixed_gamma: int
    num_steps_on: int
    num_steps_off: int
    num_probes: int
    cost_share: float = 0.0


class Ledger:
    """Fading sums over steps.

    Args:
        max_gamma: G.
    """

    def __init__(self, *, max_gamma: int) -> None:
        # Plain floats: a step must not wait for four numbers.
        self._emitted = self._seconds = self._plain_emitted = self._plain_s = 0.0
        # [2, G + 1] tokens and seconds, and what is not added to them yet: so that a decision does not wait for it.
        # In one, because another thread may be reading them.
        unseen: list[tuple[Forecast, int, float]] = []
        self._fixed = np.zeros((2, max_gamma + 1)), unseen
        self._kept = 1.0
        self._num_on = 0
        self._num_off = 0
        self._num_probes = 0

    def consider(self, forecast: Forecast, num_steps: int) -> None:
        """Hold the steps recorded since the last call against what fixed gammas would have brought.

        Args:
            forecast: of each.
            num_steps: in all.
        """
        unseen = self._fixed[1]
        unseen.append((forecast, num_steps, self._kept))
        self._kept = 1.0
        if len(unseen) >= MOST_UNSEEN:
            self._fixed = self._sums(), []

    def _sums(self) -> Rates:
        """[2, G + 1] tokens and seconds that fixed gammas would have brought."""
        sums, unseen = self._fixed
        for forecast, num_steps, kept in unseen:
            sums = sums * kept + forecast.fixed * num_steps
        return sums

    def record(self, steps: Sequence[Served], plain_s: float) -> None:
        """Add what steps brought.

        Args:
            steps: in a row.
            plain_s: that a plain step of the rows decided on takes.
        """
        kept, emitted, seconds = self._kept, self._emitted, self._seconds
        plain_emitted, total_plain_s = self._plain_emitted, self._plain_s
        num_on = num_probes = 0
        for took_s, num_emitted, num_rows, has_drafts, is_probe in steps:
            kept *= FADING
            emitted = emitted * FADING + num_emitted
            seconds = seconds * FADING + took_s
            plain_emitted = plain_emitted * FADING + num_rows
            total_plain_s = total_plain_s * FADING + plain_s
            num_on += has_drafts
            num_probes += is_probe
        self._kept, self._emitted, self._seconds = kept, emitted, seconds
        self._plain_emitted, self._plain_s = plain_emitted, total_plain_s
        self._num_on += num_on
        self._num_off += len(steps) - num_on
        self._num_probes += num_probes

    def record_rest(self, seconds: float, num_rows: int, num_steps: int) -> None:
        """Add what steps alike brought together, all plain ones of so many rows."""
        fading, num_emitted = FADING**num_steps, num_rows * num_steps
        self._kept *= fading
        self._emitted = self._emitted * fading + num_emitted
        self._seconds = self._seconds * fading + seconds
        self._plain_emitted = self._plain_emitted * fading + num_emitted
        self._plain_s = self._plain_s * fading + seconds
        self._num_off += num_steps

    def report(self, forecast: Forecast | None = None, num_steps: int = 0) -> ControlReport:
        """The sums as ratios; callable from any thread.

        Args:
            forecast: as for ``consider``, of steps recorded that it was not told of yet; None for none.
            num_steps: of these.
        """
        sums = self._sums()
        tokens, seconds_fixed = sums if forecast is None else sums + forecast.fixed * num_steps
        emitted, seconds = self._emitted, self._seconds
        plain_emitted, plain_s = self._plain_emitted, self._plain_s
        has_steps = seconds > 0.0 and plain_s > 0.0 and seconds_fixed[0] > 0.0
        fixed = tokens / np.maximum(seconds_fixed, 1e-12)
        best = int(fixed.argmax())
        return ControlReport(
            speed_up=emitted / seconds * plain_s / plain_emitted if has_steps else None,
            regret=max(0.0, 1.0 - emitted / seconds / float(fixed[best])) if has_steps else None,
            best_fixed_gamma=best,
            num_steps_on=self._num_on,
            num_steps_off=self._num_off,
            num_probes=self._num_probes,
        )
