"""The loops of a choice of gammas, compiled: what every longest draft brings, and which one to take.

A decision looks at a few rows and nine lengths: in numpy it is a hundred calls on arrays of a few numbers, and takes
a tenth of a small model's step. ``core.forecast`` says what is computed, and why; here it is written number by
number. One file, because the functions call each other (``engines.jit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows of ``facts`` [6, n].
CAP, IS_FIXED, USES_MODEL, KIND, MISSING, REMAINING = range(6)
# Rows of ``figures`` [5, G + 1].
TOKENS, SECONDS, TABLE_S, FIXED_TOKENS, FIXED_S = range(5)
# Rows of ``curves`` [2, G + 1]: verification and what a step costs the host anyway; draft calls.
VERIFY_S, CALLS_S = range(2)
# Rows of ``prices`` [2, kinds]: of a row, and of each of its draft tokens.
ROW_S, TOKEN_S = range(2)

_IDS, _WIDE = int64[:, ::1], float64[:, ::1]
_LINE = float64[::1]


@njit_exact(void(_LINE, _LINE))
def make_monotone(measured: Floats, fitted: Floats) -> None:
    """Write the middle between the least sequence above that never falls and the greatest below.

    Args:
        measured: [n] seconds.
        fitted: [n] overwritten; must not be ``measured``.
    """
    least = np.inf
    for i in range(len(measured) - 1, -1, -1):
        least = min(least, measured[i])
        fitted[i] = least
    greatest = -np.inf
    for i in range(len(measured)):
        greatest = max(greatest, measured[i])
        fitted[i] = (fitted[i] + greatest) / 2.0


@njit_exact(boolean(_IDS, _WIDE, _WIDE, _LINE, float64, _IDS))
def give_gammas(
    facts: Ints, survival: Floats, prices: Floats, once_s: Floats, pay: float, gammas: Ints
) -> bool:
    """Write the positions that pay for every longest draft; whether any gamma is another than before.

    Survival falls with the position, so that those which pay are the first ones.

    Args:
        facts: [6, n].
        survival: [n, G] that the first i + 1 draft tokens are all kept.
        prices: [2, kinds] seconds.
        once_s: [n] seconds of catching up, per token emitted.
        pay: tokens per second that a position must bring.
        gammas: [G + 1, n] overwritten.
    """
    is_other = False
    for i in range(facts.shape[1]):
        cap, price = facts[CAP, i], pay * prices[TOKEN_S, facts[KIND, i]]
        most = 0
        for j in range(survival.shape[1]):
            most += survival[i, j] > price
        most = min(most, cap)
        gained, emitted = 0.0, 1.0
        for longest in range(gammas.shape[0]):
            gamma = min(most, longest)
            if 0 < longest == gamma:
                gained += survival[i, longest - 1] - price
                emitted += survival[i, longest - 1]
            if once_s[i] > 0.0 and not gained > pay * once_s[i] * emitted:
                gamma = 0
            if facts[IS_FIXED, i]:
                gamma = cap
            is_other |= gamma != gammas[longest, i]
            gammas[longest, i] = gamma
    return is_other


@njit_exact(void(_IDS, _WIDE, _WIDE, _LINE, _IDS, _WIDE))
def weigh(
    facts: Ints, kept: Floats, prices: Floats, once_s: Floats, gammas: Ints, figures: Floats
) -> None:
    """Add to each longest draft's tokens and tabled seconds what its gammas bring and cost.

    Args:
        facts: [6, n].
        kept: [n, G + 1] draft tokens expected to be kept of as many.
        prices: [2, kinds] seconds.
        once_s: [n] seconds of catching up, per token emitted.
        gammas: [G + 1, n].
        figures: [5, G + 1], of which ``TOKENS`` and ``TABLE_S`` grow.
    """
    for longest in range(gammas.shape[0]):
        for i in range(gammas.shape[1]):
            gamma = gammas[longest, i]
            figures[TOKENS, longest] += kept[i, gamma]
            figures[TABLE_S, longest] += gamma * prices[TOKEN_S, facts[KIND, i]]
            if gamma > 0:
                figures[TABLE_S, longest] += once_s[i] * (1.0 + kept[i, gamma])


@njit_exact(void(_IDS, _WIDE, _WIDE, _LINE, _LINE, _WIDE))
def predict_fixed(
    facts: Ints, kept: Floats, prices: Floats, engine_s: Floats, scales: Floats, figures: Floats
) -> None:
    """Write what a step would bring and take if every row took the same gamma, or its cap."""
    for longest in range(len(engine_s)):
        tokens, table_s = float(facts.shape[1]), engine_s[longest]
        for i in range(facts.shape[1]):
            gamma = min(facts[CAP, i], longest)
            tokens += kept[i, gamma]
            table_s += gamma * prices[TOKEN_S, facts[KIND, i]]
        figures[FIXED_TOKENS, longest] = tokens
        figures[FIXED_S, longest] = table_s * scales[longest]


@njit_exact(float64(_IDS, _WIDE, _WIDE, _WIDE, _LINE, _WIDE))
def prepare(
    facts: Ints, survival: Floats, curves: Floats, prices: Floats, engine_s: Floats, kept: Floats
) -> float:
    """Write what a step takes but for its draft tokens, and the tokens kept; those of rows of a fixed gamma.

    Args:
        facts: [6, n].
        survival: [n, G].
        curves: [2, G + 1] seconds of this many rows.
        prices: [2, kinds] seconds.
        engine_s: [G + 1] overwritten.
        kept: [n, G + 1] overwritten.
    """
    rows_s, calls_model, fixed_tokens = 0.0, False, 0.0
    for i in range(facts.shape[1]):
        rows_s += prices[ROW_S, facts[KIND, i]]
        calls_model |= facts[USES_MODEL, i] != 0 and facts[CAP, i] > 0
        kept[i, 0] = 0.0
        for j in range(survival.shape[1]):
            kept[i, j + 1] = kept[i, j] + survival[i, j]
        if facts[IS_FIXED, i]:
            fixed_tokens += kept[i, facts[CAP, i]]
    for longest in range(len(engine_s)):
        engine_s[longest] = curves[VERIFY_S, longest] + rows_s
        if calls_model:
            engine_s[longest] += curves[CALLS_S, longest]
    return fixed_tokens


@njit_exact(
    types.Tuple((int64, float64))(_IDS, _WIDE, _WIDE, _WIDE, _LINE, _LINE, float64, _WIDE, _IDS)
)
def predict(
    facts: Ints,
    survival: Floats,
    curves: Floats,
    prices: Floats,
    once_s: Floats,
    scales: Floats,
    time_left_s: float,
    figures: Floats,
    gammas: Ints,
) -> tuple[int, float]:
    """Write what every longest draft brings; the floor, and the tokens that a plain step emits.

    Args:
        facts: [6, n] of the rows.
        survival: [n, G].
        curves: [2, G + 1] seconds of this many rows.
        prices: [2, kinds] seconds.
        once_s: [n] seconds of catching up, per token emitted.
        scales: [G + 1] measured over tabled time.
        time_left_s: until the earliest deadline; infinite without one.
        figures: [5, G + 1] overwritten.
        gammas: [G + 1, n] overwritten.
    """
    width, num_rows = gammas.shape
    engine_s, kept = np.empty(width), np.empty((num_rows, width))
    fixed_tokens = prepare(facts, survival, curves, prices, engine_s, kept)
    floor = ceiling = 0
    for i in range(num_rows):
        ceiling = max(ceiling, facts[CAP, i])
        if facts[IS_FIXED, i]:
            floor = max(floor, facts[CAP, i])
    give_gammas(facts, survival, prices, once_s, num_rows / (engine_s[0] * scales[0]), gammas)
    least_s = engine_s[floor] if floor else 0.0
    for again in range(2):
        for longest in range(width):
            figures[TOKENS, longest] = num_rows
            figures[TABLE_S, longest] = max(engine_s[longest], least_s)
        weigh(facts, kept, prices, once_s, gammas, figures)
        make_monotone(figures[TABLE_S] * scales, figures[SECONDS])
        is_in_time = figures[SECONDS, floor] <= time_left_s
        pay = 0.0
        for longest in range(width):
            is_late = is_in_time and figures[SECONDS, longest] > time_left_s
            if longest < floor or longest > ceiling or is_late:
                figures[SECONDS, longest] = np.inf
            pay = max(pay, figures[TOKENS, longest] / figures[SECONDS, longest])
        # At the best rate that these gammas reach, fewer or more may pay.
        if again or not give_gammas(facts, survival, prices, once_s, pay, gammas):
            break
    predict_fixed(facts, kept, prices, engine_s, scales, figures)
    return floor, num_rows + fixed_tokens


@njit_exact(int64(_WIDE, int64, int64, float64, float64))
def pick(figures: Floats, floor: int, in_use: int, lead: float, margin: float) -> int:
    """The longest draft to take; the one in use keeps its place until another promises a margin more.

    Args:
        figures: [5, G + 1] that ``predict`` wrote.
        floor: longest draft of rows of a fixed gamma.
        in_use: the one in use; beyond G for none.
        lead: share that drafts must promise beyond none.
        margin: share that another must promise.
    """
    best, best_rate, rate_in_use = 0, -1.0, 0.0
    for longest in range(figures.shape[1]):
        rate = figures[TOKENS, longest] / figures[SECONDS, longest]
        if longest == floor:
            rate *= 1.0 + lead
        if rate > best_rate:
            best, best_rate = longest, rate
        if longest == in_use:
            rate_in_use = rate
    if rate_in_use <= 0.0 or best_rate > rate_in_use * (1.0 + margin):
        return best
    return in_use
