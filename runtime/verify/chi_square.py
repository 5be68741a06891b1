"""Pearson's tests of drawn tokens, with numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# Expected draws that a bin needs for the chi-square distribution to hold; rarer tokens are pooled.
MIN_EXPECTED = 10.0

Counts = npt.NDArray[np.float64]


def goodness_of_fit(counts: Mapping[int, int], probs: Counts) -> float:
    """Return the p-value of Pearson's test of counts against probabilities; 0.0 for an impossible token.

    Args:
        counts: draws by token.
        probs: [V] float64, sums to 1.
    """
    num_draws = sum(counts.values())
    if any(probs[token] == 0.0 for token in counts):
        return 0.0
    observed = np.zeros(len(probs))
    observed[list(counts)] = list(counts.values())
    expected, pooled = _pool(probs * num_draws, observed[None])
    statistic = float(((pooled[0] - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, len(expected) - 1)


def homogeneity(left: Mapping[int, int], right: Mapping[int, int]) -> float:
    """Return the p-value of Pearson's test that two equally large samples have one distribution."""
    tokens = sorted(set(left) | set(right))
    observed = np.array([[side.get(token, 0) for token in tokens] for side in (left, right)])
    expected, pooled = _pool(observed.mean(axis=0), observed)
    statistic = float(((pooled - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, len(expected) - 1)


def _pool(expected: Counts, observed: Counts) -> tuple[Counts, Counts]:
    """Merge the bins that expect too few draws into one, and a small one into the least of the others."""
    is_kept = expected >= MIN_EXPECTED
    kept, rows = expected[is_kept], observed[:, is_kept].astype(np.float64)
    rare, rare_rows = expected[~is_kept].sum(), observed[:, ~is_kept].sum(axis=1)
    if rare >= MIN_EXPECTED or len(kept) == 0:
        return np.append(kept, rare), np.column_stack([rows, rare_rows])
    least = int(kept.argmin())
    kept[least] += rare
    rows[:, least] += rare_rows
    return kept, rows


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return P(X >= statistic) of the chi-square distribution; 1.0 without degrees of freedom.

    Source: the finite sums of the upper incomplete gamma function, Abramowitz and Stegun 26.4.4-5.
    """
    if degrees == 0 or statistic <= 0.0:
        return 1.0
    half = statistic / 2.0
    is_odd = degrees % 2 == 1
    total = math.erfc(math.sqrt(half)) if is_odd else 0.0
    shape = 0.5 if is_odd else 0.0
    while shape < degrees / 2.0:
        total += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1.0))
        shape += 1.0
    return min(total, 1.0)
