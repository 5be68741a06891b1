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
from typing import NamedTuple

import numpy as np
from outrider.runtime.gamma import step_time_loops
from outrider.runtime.gamma.acceptance import Rates

LEAST_SPREAD = 0.2
"""Prior standard deviation of a table's errors where its measurements agreed."""
# Standard deviations of one step's time over its mean before any was seen, and of the level.
FIRST_NOISE, FIRST_LEVEL = 0.15, 1.0
# Half of an error is common to all drafts; the rest is alike for neighbouring lengths.
COMMON, LIKENESS = 0.5, 0.7


class _Filter(NamedTuple):
    """What was learnt of about so many rows: all changed in place.

    Attributes:
        mean: [G + 2] level, then errors.
        covariance: [G + 2, G + 2].
        scales: [G + 1] exponentials of level and error together.
    """

    mean: Rates
    covariance: Rates
    scales: Rates


class StepTimes:
    """What was learnt; its owner is the worker's thread.

    Args:
        max_gamma: G.
        spread: disagreement of the table's own measurements, as a share.
    """

    def __init__(self, *, max_gamma: int, spread: float = 0.0) -> None:
        self._prior = _prior(max_gamma, max(spread, LEAST_SPREAD))
        self._noise = FIRST_NOISE
        self._filters: dict[int, _Filter] = {}

    def learn(self, num_rows: int, kinds: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Take in the times of steps.

        Args:
            num_rows: that decoded.
            kinds: longest draft, and measured over tabled time of each step of it, positive.
        """
        told: list[float] = []
        counts: list[int] = []
        for longest, ratios in kinds:
            told += ratios
            counts += (longest, len(ratios))
        known = self._of(num_rows)
        self._noise = step_time_loops.take_in_kinds(
            known.mean,
            known.covariance,
            self._prior,
            np.array(counts, dtype=np.int64),
            np.array(told),
            self._noise,
            known.scales,
        )

    def scales(self, num_rows: int) -> Rates:
        """[G + 1] what to multiply tabled times with, by the longest draft; only ``learn`` may change it, in place."""
        return self._of(num_rows).scales

    def covariance(self, num_rows: int) -> Rates:
        """[G + 2, G + 2] of the level and the errors of steps over about so many rows; must not be changed."""
        return self._of(num_rows).covariance

    def _of(self, num_rows: int) -> _Filter:
        """The filter for about so many rows; a new one begins with what the nearest one knows."""
        key = about(num_rows)
        known = self._filters.get(key)
        if known is None:
            size = len(self._prior)
            mean, scales = np.zeros(size), np.ones(size - 1)
            nearest = min(self._filters, key=lambda other: abs(other - key), default=None)
            if nearest is not None:
                mean, _, scales = self._filters[nearest]
                mean, scales = mean.copy(), scales.copy()
            known = self._filters[key] = _Filter(mean, self._prior.copy(), scales)
        return known


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
