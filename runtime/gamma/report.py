"""Sums up what speculation brought: realised speed-up, and regret against the best fixed gamma.

Sums fade, so that both speak of recent traffic. The speed-up compares the tokens per second of all steps with those of
the same rows without drafts, at the plain step time that is measured. The regret compares with the best gamma that
every row might have had all the time, at the acceptance and the times that were known when it was decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.runtime.core.stats import ControlReport
from outrider.runtime.gamma.choose import Floats

FADING = 0.999  # of all sums, per step: about a thousand steps count


class Ledger:
    """Fading sums over steps, for draft lengths 0..G; written by the worker's thread, read by any."""

    def __init__(self, max_gamma: int) -> None:
        # Emitted tokens and seconds as served, and of plain decoding of the same rows.
        self._sums: Floats = np.zeros(4)
        # [2, G + 1] tokens and seconds, as every fixed gamma would have had them.
        self._fixed: Floats = np.zeros((2, max_gamma + 1))
        self._num_steps = self._num_on = self._num_off = self._num_probes = 0
        self._served_s = self.decided_s = 0.0

    def step(self, served: Sequence[float], *, is_on: bool, is_probe: bool) -> None:
        """Add one step: its tokens and seconds, then those of a plain step of its rows."""
        self._sums = FADING * self._sums + served
        self._served_s += served[1]
        self._num_steps += 1
        self._num_on += is_on
        self._num_off += not is_on
        self._num_probes += is_probe

    def consider(self, fixed: Floats) -> None:
        """Hold the steps since the last call against fixed gammas: [2, G + 1] tokens and seconds of one step."""
        self._fixed = self._fixed * FADING**self._num_steps + fixed * self._num_steps
        self._num_steps = 0

    def report(self) -> ControlReport:
        """Return the sums as ratios; callable from any thread."""
        emitted, seconds, plain_emitted, plain_s = self._sums.tolist()
        tokens, fixed_s = self._fixed
        has_steps = seconds > 0.0 and plain_s > 0.0
        rates = tokens / np.maximum(fixed_s, 1e-12)
        best = int(rates.argmax())
        is_held = has_steps and rates[best] > 0.0
        return ControlReport(
            speed_up=emitted / seconds * plain_s / plain_emitted if has_steps else None,
            regret=max(0.0, 1.0 - emitted / seconds / float(rates[best])) if is_held else None,
            best_fixed_gamma=best,
            num_steps_on=self._num_on,
            num_steps_off=self._num_off,
            num_probes=self._num_probes,
            cost_share=self.decided_s / self._served_s if self._served_s else 0.0,
        )
