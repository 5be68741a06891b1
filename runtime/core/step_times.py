"""How long steps really take, against what the cost table says: learnt from the steps that were served.

For about n rows, the logarithm of measured over tabled time of a step whose longest draft is G is taken as
``level + error[G]``. The level wanders: whatever else the machine does, it does to every step, and it
decides nothing. The errors are the table's own: prior N(0, spread^2), alike for drafts of about the
same length, and forgotten where they are not seen again. Both are followed by a Kalman filter, which
keeps them apart: a step without drafts among steps with them moves the errors, a machine that slows
down moves the level. Means count, not medians: where others use the machine a step is held up now and
then, and one of more calls more often. How much a mean tells depends on how its steps scatter.

A filter per power of two of rows, so that what was learnt of one load is kept for its return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.core import step_time_loops
from runtime.core.acceptance import Rates

LEAST_SPREAD = 0.2
"""Prior standard deviation of a table's errors where its measurements agreed."""
# Standard deviations of one step's time over its mean before any was seen, and of the level.
FIRST_NOISE, FIRST_LEVEL = 0.15, 1.0
# Half of an error is common to all drafts; the rest is alike for neighbouring lengths.
COMMON, LIKENESS = 0.5, 0.7


class StepTimes:
    """What was learnt; its owner is the worker's thread.

    Args:
        max_gamma: G.
        spread: disagreement of the table's own measurements, as a share.
    """

    def __init__(self, *, max_gamma: int, spread: float = 0.0) -> None:
        self._prior = _prior(max_gamma, max(spread, LEAST_SPREAD))
        self._noise = FIRST_NOISE
        self._means: dict[int, Rates] = {}
        self._covariances: dict[int, Rates] = {}
        # Asked for at every step, and changed by ``learn`` alone.
        self._scales: dict[int, Rates] = {}

    def learn(self, num_rows: int, longest: int, ratios: Sequence[float]) -> None:
        """Take in the times of steps of one kind.

        Args:
            num_rows: that decoded.
            longest: their longest draft.
            ratios: measured over tabled time of each, positive.
        """
        mean, covariance = self._of(num_rows)
        told = np.array(ratios, dtype=np.float64)
        self._noise = step_time_loops.take_in(
            mean, covariance, self._prior, longest, told, self._noise
        )
        # Of other numbers of rows, too: those without a filter of their own went by this one.
        self._scales.clear()

    def scales(self, num_rows: int) -> Rates:
        """[G + 1] what to multiply tabled times with, by the longest draft."""
        key = about(num_rows)
        scales = self._scales.get(key)
        if scales is None:
            mean, _ = self._of(num_rows)
            scales = self._scales[key] = np.exp(mean[0] + mean[1:])
            scales.flags.writeable = False
        return scales

    def doubt(self, num_rows: int, longest: int) -> Rates:
        """[G + 1] standard deviation of the logarithm of each step's time over that of ``longest``."""
        _, covariance = self._of(num_rows)
        doubt = np.empty(len(covariance) - 1)
        step_time_loops.write_doubt(covariance, longest, doubt)
        return doubt

    def _of(self, num_rows: int) -> tuple[Rates, Rates]:
        """The filter for about so many rows; a new one begins with what the nearest one knows."""
        key = about(num_rows)
        if key not in self._means:
            known = min(self._means, key=lambda other: abs(other - key), default=None)
            self._means[key] = (
                np.zeros(len(self._prior)) if known is None else self._means[known].copy()
            )
            self._covariances[key] = self._prior.copy()
        return self._means[key], self._covariances[key]


def about(num_rows: int) -> int:
    """The same for numbers of rows that one filter follows."""
    return (num_rows - 1).bit_length()


def _prior(max_gamma: int, spread: float) -> Rates:
    """[G + 2, G + 2] covariance of the level and of the errors before anything was served."""
    prior = np.zeros((max_gamma + 2, max_gamma + 2))
    prior[0, 0] = FIRST_LEVEL**2
    prior[1, 1] = spread**2
    lengths = np.arange(max_gamma)
    likeness = LIKENESS ** np.abs(lengths[:, None] - lengths[None, :])
    prior[2:, 2:] = spread**2 * (COMMON + (1.0 - COMMON) * likeness)
    return prior
