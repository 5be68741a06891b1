"""What it costs to feed the draft model what rows miss, compiled; one file, because the functions call each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float64, int64, void
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows of ``facts``, as in ``choice_loops``.
CAP, IS_FIXED, USES_MODEL, KIND, MISSING, REMAINING = range(6)

_IDS, _WIDE, _LINE = int64[:, ::1], float64[:, ::1], float64[::1]


@njit_exact(void(int64[::1], _WIDE, int64, _LINE))
def price_feeding(num_missing: Ints, catch_up: Floats, shared: int, seconds: Floats) -> None:
    """Write what it takes to feed the draft model what each row misses, beyond what is fed along anyway.

    The longest span of the table is the longest that one call takes, so that more of them cost several calls, and
    each its share of what a call costs anyway.

    Args:
        num_missing: [n] tokens.
        catch_up: [2, m] tokens of one row, ascending, and seconds to feed them; m may be 0.
        shared: tokens a row may miss and still be fed with the others.
        seconds: [n] overwritten.
    """
    tokens, table_s = catch_up[0], catch_up[1]
    last = len(tokens) - 1
    for i in range(len(num_missing)):
        seconds[i] = 0.0
        if last < 0 or num_missing[i] <= shared:
            continue
        fed = num_missing[i] - 1
        at = 0
        while at < last and tokens[at + 1] <= fed:
            at += 1
        seconds[i] = table_s[at]
        if fed > tokens[0] and at < last:
            slope = (table_s[at + 1] - table_s[at]) / (tokens[at + 1] - tokens[at])
            seconds[i] = slope * (fed - tokens[at]) + table_s[at]
        seconds[i] += max(fed - tokens[last], 0.0) * (table_s[last] / tokens[last])


@njit_exact(void(_IDS, _WIDE, int64, int64, _LINE))
def price_catching_up(
    facts: Ints, catch_up: Floats, shared: int, horizon: int, once_s: Floats
) -> None:
    """Write the seconds that catching up costs each row that goes on drafting after it, per token that it then emits.

    Args:
        facts: [6, n].
        catch_up: as for ``price_feeding``.
        shared: as there.
        horizon: tokens over which catching up is to pay.
        once_s: [n] overwritten.
    """
    price_feeding(facts[MISSING], catch_up, shared, once_s)
    for i in range(facts.shape[1]):
        if facts[USES_MODEL, i] and not facts[IS_FIXED, i] and facts[CAP, i] > 0:
            once_s[i] /= min(max(facts[REMAINING, i], 1), horizon)
        else:
            once_s[i] = 0.0
