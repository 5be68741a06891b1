"""The filter behind ``core.step_times``, compiled: what is assumed, and how steps of one kind are taken in.

Its numbers stand here and not there, because what is compiled is kept until this file changes (``engines.jit``).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Standard deviations: of one step's time over its mean, at least; of the level's wandering per step, and at most.
LEAST_NOISE, WANDERING, MOST_WANDERING = 0.03, 0.02, 0.3
# Share of a new scatter in the noise, per step, and at most.
NOISE_SHARE, MOST_SHARE = 0.03, 0.5
# Times what is expected that one step may count for.
MOST_HELD_UP = 8.0
# Share of the prior that returns per step: what was learnt ages, and is tried again.
FORGETTING = 2e-4
MOST_LOG = math.log(10.0)

_LINE, _WIDE, _INDICES = float64[::1], float64[:, ::1], int64[::1]


@njit_exact(types.UniTuple(float64, 3)(_LINE, float64, float64))
def look(ratios: Floats, expected: float, noise: float) -> tuple[float, float, float]:
    """Logarithm of the mean of steps of one kind, its variance, and the noise as it is held to be now.

    Args:
        ratios: measured over tabled times, positive.
        expected: logarithm of the mean.
        noise: standard deviation of one step over its mean.
    """
    count, usual = len(ratios), math.exp(expected)
    most = MOST_HELD_UP * max(usual, ratios.min())
    mean = 0.0
    for ratio in ratios:
        mean += min(ratio, most)
    mean /= count
    # A single step can only be held against what was expected.
    middle = mean if count > 1 else usual
    squares = 0.0
    for ratio in ratios:
        squares += (min(ratio, most) - middle) ** 2
    scatter = min(math.sqrt(squares / max(count - 1, 1)) / middle, MOST_HELD_UP)
    noise += min(MOST_SHARE, NOISE_SHARE * count) * (scatter - noise)
    noise = max(LEAST_NOISE, noise)
    variance = (max(noise, scatter) if count > 1 else noise) ** 2 / count
    # The logarithm of a mean of few is less than that of the mean, on average.
    return math.log(mean) + variance / 2.0, variance, noise


@njit_exact(float64(_LINE, _WIDE, _WIDE, int64, _LINE, float64))
def take_in(
    mean: Floats, covariance: Floats, prior: Floats, longest: int, ratios: Floats, noise: float
) -> float:
    """Move the filter by the times of steps of one kind; the noise as it is held to be now.

    Args:
        mean: [G + 2] level, then errors; changed.
        covariance: [G + 2, G + 2] changed.
        prior: [G + 2, G + 2] covariance before anything was served.
        longest: draft of these steps.
        ratios: measured over tabled times, positive, at least one.
        noise: standard deviation of one step over its mean.
    """
    size, at, forgotten = len(mean), 1 + longest, FORGETTING * len(ratios)
    along = np.empty(size)
    for i in range(size):
        for j in range(size):
            covariance[i, j] += forgotten * (prior[i, j] - covariance[i, j])
        if i:
            mean[i] *= 1.0 - forgotten
    covariance[0, 0] += min(WANDERING**2 * len(ratios), MOST_WANDERING**2)
    expected = mean[0] + mean[at]
    seen, variance, noise = look(ratios, expected, noise)
    for i in range(size):
        along[i] = covariance[0, i] + covariance[at, i]
    total = along[0] + along[at] + variance
    for i in range(size):
        gain = along[i] / total
        mean[i] = min(max(mean[i] + gain * (seen - expected), -MOST_LOG), MOST_LOG)
        for j in range(size):
            covariance[i, j] -= gain * along[j]
    return noise


@njit_exact(float64(_LINE, _WIDE, _WIDE, _INDICES, _LINE, float64, _LINE))
def take_in_kinds(
    mean: Floats,
    covariance: Floats,
    prior: Floats,
    kinds: Ints,
    ratios: Floats,
    noise: float,
    scales: Floats,
) -> float:
    """Move the filter by the times of steps of several kinds, one after the other; the noise as it is held to be now.

    Args:
        mean: as for ``take_in``; changed.
        covariance: as there; changed.
        prior: as there.
        kinds: of each, its longest draft and the number of its steps, at least one.
        ratios: of all steps, kind by kind.
        noise: as for ``take_in``.
        scales: [G + 1] overwritten: what to multiply tabled times with, by the longest draft.
    """
    used = 0
    for at in range(0, len(kinds), 2):
        end = used + kinds[at + 1]
        noise = take_in(mean, covariance, prior, kinds[at], ratios[used:end], noise)
        used = end
    for longest in range(len(scales)):
        scales[longest] = math.exp(mean[0] + mean[1 + longest])
    return noise
