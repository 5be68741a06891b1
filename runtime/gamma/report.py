"""Sums up what speculation brought: realised speed-up, and regret against the best fixed gamma.

Sums fade, so that both speak of recent traffic. The speed-up compares the tokens per second of all steps with those of
the same rows without drafts, at the plain step time that is measured. The regret compares with the best gamma that
every row might have had all the time, at the acceptance and the times that were known when it was decided.

The worker's thread writes while any thread reads. So all sums are one value that is replaced as a whole, and a report
is made of the one that it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from outrider.runtime.core.stats import ControlReport
from outrider.runtime.gamma.choose import Floats

FADING = 0.999  # of all sums, per step: about a thousand steps count


class _Sums(NamedTuple):
    """What a report is made of; arrays are replaced, never written into.

    Attributes:
        faded: [4] float64: emitted tokens and seconds as served, and of plain decoding of the same rows.
        fixed: [2, G + 1] float64: tokens and seconds, as every fixed gamma would have had them.
        num_open: steps since fixed gammas were last considered.
    """

    faded: Floats
    fixed: Floats
    num_open: int = 0
    num_on: int = 0
    num_off: int = 0
    num_probes: int = 0
    served_s: float = 0.0
    decided_s: float = 0.0


class GammaStats:
    """Fading sums over steps, for draft lengths 0..G; written by the worker's thread, read by any."""

    def __init__(self, max_gamma: int) -> None:
        self._sums = _Sums(np.zeros(4), np.zeros((2, max_gamma + 1)))

    def step(self, served: Sequence[float], *, is_on: bool, is_probe: bool) -> None:
        """Add one step: its tokens and seconds, then those of a plain step of its rows."""
        sums = self._sums
        self._sums = sums._replace(
            faded=FADING * sums.faded + served,
            served_s=sums.served_s + served[1],
            num_open=sums.num_open + 1,
            num_on=sums.num_on + is_on,
            num_off=sums.num_off + (not is_on),
            num_probes=sums.num_probes + is_probe,
        )

    def consider(self, fixed: Floats) -> None:
        """Hold the steps since the last call against fixed gammas: [2, G + 1] tokens and seconds of one step."""
        sums = self._sums
        faded = sums.fixed * FADING**sums.num_open + fixed * sums.num_open
        self._sums = sums._replace(fixed=faded, num_open=0)

    def decided(self, seconds: float) -> None:
        """Add the time of a decision."""
        self._sums = self._sums._replace(decided_s=self._sums.decided_s + seconds)

    def report(self) -> ControlReport:
        """Return the sums as ratios; callable from any thread."""
        sums = self._sums
        emitted, seconds, plain_emitted, plain_s = sums.faded.tolist()
        tokens, fixed_s = sums.fixed
        has_steps = seconds > 0.0 and plain_s > 0.0
        rates = tokens / np.maximum(fixed_s, 1e-12)
        best = int(rates.argmax())
        is_held = has_steps and rates[best] > 0.0
        return ControlReport(
            speed_up=emitted / seconds * plain_s / plain_emitted if has_steps else None,
            regret=max(0.0, 1.0 - emitted / seconds / float(rates[best])) if is_held else None,
            best_fixed_gamma=best,
            num_steps_on=sums.num_on,
            num_steps_off=sums.num_off,
            num_probes=sums.num_probes,
            cost_share=sums.decided_s / sums.served_s if sums.served_s else 0.0,
        )
