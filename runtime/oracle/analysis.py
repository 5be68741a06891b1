"""Formulas for the gain of speculation, from Leviathan et al. 2023 (arXiv:2211.17192).

Pure functions of numbers. Symbols: alpha is the mean acceptance probability of a draft token, gamma
the tokens drafted per target pass, c the time of a draft step in units of a plain target step. The
paper lets the verification of gamma + 1 tokens cost one step; here it costs a measured v(gamma + 1).
At v = 1 every function is the paper's.

Limit: the formulas take the acceptances of a draft as independent and equally likely. Where they
are positively correlated more tokens come out than ``expected_tokens`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Probs = npt.NDArray[np.float64]
Interval = tuple[float, float]
_RESAMPLES, _CONFIDENCE = 2000, 0.95
_ROUNDING = 1e-9


def lenient_acceptance(target_probs: Probs, draft_probs: Probs, lenience: float) -> float:
    """Return the probability that a draft token is kept at up to 1 / lenience times the target's probability.

    Args:
        target_probs: [V] float64, sums to 1 (p).
        draft_probs: [V] float64, sums to 1 (q).
        lenience: l in (0, 1]; 1 is exact.

    Source: Theorem 3.5, sum of min(p, q), beta in the source; l: appendix A.5, sum of min(p / l, q).
    """
    return float(np.minimum(target_probs / lenience, draft_probs).sum())


def rejection_acceptance(target_probs: Probs, draft_probs: Probs) -> float:
    """Return the probability that plain rejection sampling keeps a draft token; never above ``lenient_acceptance``.

    It keeps a token with p / (M q), where M bounds p / q, so that what is kept has the target's distribution.

    Args:
        target_probs: [V] float64, sums to 1 (p).
        draft_probs: [V] float64, sums to 1 (q).

    Source: appendix A.2, 1 / M = min of q / p over what p does not exclude.
    """
    possible = target_probs > 0.0
    return float((draft_probs[possible] / target_probs[possible]).min())


def oracle_tokens(alpha: float) -> float | None:
    """Return the tokens per target pass that no choice of gamma exceeds; None where alpha is 1 but for rounding.

    An oracle drafts exactly what will be kept, so that each pass ends with a token that is not. A share 1 - alpha of
    positions is such a token, whatever acceptance the single positions have.

    Source: section 3.5, 1 / (1 - alpha).
    """
    return None if alpha > 1.0 - _ROUNDING else 1.0 / (1.0 - alpha)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the mean tokens emitted per target pass, 1 + alpha + ... + alpha^gamma.

    Source: equation (1).
    """
    if alpha == 1.0:
        return gamma + 1.0
    return float((1.0 - alpha ** (gamma + 1)) / (1.0 - alpha))


def walltime_factor(alpha: float, gamma: int, c: float, *, verify_cost: float = 1.0) -> float:
    """Return the speed-up over plain decoding.

    Args:
        alpha: in [0, 1].
        gamma: tokens drafted per target pass.
        c: draft step over plain target step.
        verify_cost: v(gamma + 1), target pass over gamma + 1 tokens over plain target step.

    Source: Theorem 3.8, generalised.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return the arithmetic operations over those of plain decoding; at least 1.

    Args:
        alpha: in [0, 1].
        gamma: tokens drafted per target pass.
        c_hat: operations per token of the draft over those of the target.

    Source: Theorem 3.11.
    """
    return (gamma * c_hat + gamma + 1.0) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: float,
    c: float,
    *,
    max_gamma: int,
    verify_cost: Callable[[int], float] = lambda num_tokens: 1.0,
) -> tuple[int, float]:
    """Return the best gamma up to a cap, 0 included, and its speed-up; the smaller of equals wins.

    Args:
        alpha: in [0, 1].
        c: draft step over plain target step.
        max_gamma: cap.
        verify_cost: v(k) for k = gamma + 1 tokens, in plain target steps.

    Source: section 3.5; every gamma is tried, as v need not keep the factor unimodal.
    """
    best, best_factor = 0, 1.0
    for gamma in range(1, max_gamma + 1):
        factor = walltime_factor(alpha, gamma, c, verify_cost=verify_cost(gamma + 1))
        if factor > best_factor:
            best, best_factor = gamma, factor
    return best, best_factor


def ratio_interval(
    above: Sequence[float] | Probs, below: Sequence[float] | Probs
) -> Interval | None:
    """Return the interval of a ratio of sums over texts, which are drawn anew; None for fewer than two texts.

    Args:
        above: [n] by text.
        below: [n] likewise, above 0.

    Source: Efron 1979, the bootstrap's percentiles; texts, not tokens, are independent.
    """
    if len(above) < 2:
        return None
    chosen = np.random.default_rng(0).integers(0, len(above), (_RESAMPLES, len(above)))
    ratios = np.asarray(above)[chosen].sum(axis=1) / np.asarray(below)[chosen].sum(axis=1)
    low, high = np.quantile(ratios, (0.5 - _CONFIDENCE / 2, 0.5 + _CONFIDENCE / 2))
    return float(low), float(high)
