"""The loops of what is tried besides the best choice, compiled; ``core.trials`` says what is computed, and why.

One file, because the functions call each other (``engines.jit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types, void
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows of ``facts`` and ``figures``, as in ``choice_loops``.
CAP, IS_FIXED, USES_MODEL, KIND, MISSING, REMAINING = range(6)
TOKENS, SECONDS, TABLE_S, FIXED_TOKENS, FIXED_S = range(5)
LEAST_WASTE = 0.05
"""Share of a trial's time that counts as wasted at least."""
# Steps with drafts before the first probe, and between two at least; gain of drafts, as a share, below which one is not
# held to cost less.
FIRST_PROBE, LEAST_GAIN = 64, 0.02
SETTLING, TIMED = 5, 2
"""Plain steps in a row whose times say nothing yet, and those behind them that a probe takes the time of."""
LEAST_COST = 0.01
"""Of a plain step, that each step of an exploration is held to cost at least."""

_IDS, _WIDE, _LINE = int64[:, ::1], float64[:, ::1], float64[::1]
_INDICES = int64[::1]


@njit_exact(void(_WIDE, int64, _LINE))
def write_doubt(covariance: Floats, longest: int, doubt: Floats) -> None:
    """Write the standard deviation of the logarithm of each step's time over that of ``longest``.

    Args:
        covariance: [G + 2, G + 2] of level and errors.
        longest: draft of the step that others are held against.
        doubt: [G + 1] overwritten.
    """
    at = 1 + longest
    for i in range(len(doubt)):
        variance = covariance[1 + i, 1 + i] + covariance[at, at] - 2.0 * covariance[at, 1 + i]
        doubt[i] = np.sqrt(max(variance, 0.0))


@njit_exact(types.Tuple((int64, float64))(_WIDE, _LINE, int64, float64))
def pick_other(figures: Floats, doubt: Floats, best: int, margin: float) -> tuple[int, float]:
    """Another longest draft that may be better by a margin for all that is known of its time, else ``best``.

    Args:
        figures: [5, G + 1] that ``predict`` wrote.
        doubt: [G + 1] standard deviation of the logarithm of each step's time over that of ``best``.
        best: longest draft in use, at least 1.
        margin: share.

    Returns:
        The other, and the seconds of its step that are held to be wasted.
    """
    other, hope = best, 0.0
    for longest in range(1, figures.shape[1]):
        rate = figures[TOKENS, longest] / figures[SECONDS, longest] * np.exp(doubt[longest])
        if longest != best and rate > hope:
            other, hope = longest, rate
    best_rate = figures[TOKENS, best] / figures[SECONDS, best]
    if not hope > best_rate * (1.0 + margin):
        return best, 0.0
    seconds = figures[SECONDS, other]
    rate = figures[TOKENS, other] / seconds
    return other, max(1.0 - rate / best_rate, LEAST_WASTE) * seconds


@njit_exact(float64(_WIDE, int64, int64, float64, float64))
def probe_distance(figures: Floats, best: int, floor: int, share: float, behind_s: float) -> float:
    """Steps with drafts between two probes, so that these cost their share of the time.

    Args:
        figures: [5, G + 1] that ``predict`` wrote.
        best: longest draft in use, at least 1.
        floor: longest draft of rows of a fixed gamma.
        share: of the time, positive.
        behind_s: seconds to feed the draft model what it missed in a probe.
    """
    gain = figures[TOKENS, best] / figures[SECONDS, best]
    gain /= figures[TOKENS, floor] / figures[SECONDS, floor]
    price = (SETTLING + TIMED) * max(gain - 1.0, LEAST_GAIN) + behind_s / figures[SECONDS, best]
    return float(max(price / share, FIRST_PROBE))


@njit_exact(
    types.Tuple((int64, float64, float64))(_WIDE, _WIDE, int64, int64, float64, float64, float64)
)
def plan(
    figures: Floats,
    covariance: Floats,
    best: int,
    floor: int,
    margin: float,
    share: float,
    behind_s: float,
) -> tuple[int, float, float]:
    """What ``pick_other`` and ``probe_distance`` answer.

    Args:
        figures: [5, G + 1] that ``predict`` wrote.
        covariance: [G + 2, G + 2] of the level and the errors of step times, see ``core.step_times``.
        best: longest draft in use, at least 1.
        floor: longest draft of rows of a fixed gamma.
        margin: as for ``pick_other``.
        share: as for ``probe_distance``.
        behind_s: as there.
    """
    doubt = np.empty(figures.shape[1])
    write_doubt(covariance, best, doubt)
    other, wasted_s = pick_other(figures, doubt, best, margin)
    return other, wasted_s, probe_distance(figures, best, floor, share, behind_s)


@njit_exact(
    types.Tuple((int64, float64))(_IDS, _WIDE, _WIDE, _LINE, int64, int64, int64, int64, _INDICES)
)
def explore(
    facts: Ints,
    survival: Floats,
    figures: Floats,
    feeding_s: Floats,
    num_trials: int,
    num_steps: int,
    chunk: int,
    shared: int,
    gammas: Ints,
) -> tuple[int, float]:
    """Write one token for as many rows as tell most for their price; steps that it takes, 0 for none, and its cost.

    Args:
        facts: [6, n] of the rows.
        survival: [n, G].
        figures: [5, G + 1] that ``predict`` wrote.
        feeding_s: [n] seconds to feed the draft model what rows miss, beyond what is fed along anyway.
        num_trials: drafts that are to be judged at least.
        num_steps: steps to be taken at least.
        chunk: tokens that rows are fed in one step to catch up, together.
        shared: tokens a row may miss and still be fed with the others.
        gammas: [n] overwritten; rows of a fixed gamma keep it.
    """
    num_rows = facts.shape[1]
    order, missing = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    num_may = 0
    for i in range(num_rows):
        gammas[i] = facts[CAP, i] if facts[IS_FIXED, i] else 0
        if facts[IS_FIXED, i] or facts[CAP, i] <= 0:
            continue
        missed = facts[MISSING, i] if facts[USES_MODEL, i] else 0
        if facts[REMAINING, i] <= num_trials + missed // chunk:
            continue
        # In order of what they miss.
        at = num_may
        while at and missing[at - 1] > missed:
            order[at], missing[at] = order[at - 1], missing[at - 1]
            at -= 1
        order[at], missing[at] = i, missed
        num_may += 1
    if not num_may or figures.shape[1] < 2:
        return 0, 0.0
    plain_s = figures[FIXED_S, 0]
    longer_s = figures[FIXED_S, 1] - plain_s
    least_s = max(LEAST_WASTE * longer_s, LEAST_COST * plain_s)
    fed, once_s, kept = 0, 0.0, 0.0
    best, best_steps, best_cost_s, least_price = 0, 0, 0.0, np.inf
    for at in range(num_may):
        count = at + 1
        if missing[at] > shared:
            fed += missing[at] - 1
            once_s += feeding_s[order[at]]
        kept += survival[order[at], 0]
        steps = max(-(-num_trials // count), num_steps) + max(-(-fed // chunk), 1) - 1
        gained_s = kept * plain_s / num_rows
        cost_s = once_s + steps * min(max(longer_s - gained_s, least_s), plain_s)
        price = cost_s / (count * steps)
        if price < least_price:
            best, best_steps, best_cost_s, least_price = count, steps, cost_s, price
    for at in range(best):
        gammas[order[at]] = 1
    return best_steps, best_cost_s
