"""The loops of a choice of gammas where engines pack rows: a further token of one row has a price of its own.

A verification costs by the total of tokens, and a draft call by the rows that still draft. A row takes the positions
that bring a part of their price. Were it the whole, rows whose drafts fare better would run ahead and end early, and
those left without any would go on alone, at a higher price per token, and teach nothing of their drafts.
``core.forecast`` says what is computed; one file, because the functions call each other (``engines.jit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types, void
from outrider.engines.jit import njit_exact

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows of ``facts``, ``figures`` and ``prices``, as in ``choice_loops``.
CAP, IS_FIXED, USES_MODEL, KIND = range(4)
TOKENS, SECONDS, TABLE_S, FIXED_TOKENS, FIXED_S = range(5)
ROW_S, TOKEN_S = range(2)
# Of ``shares``, as in ``evidence_loops``.
PROPOSED, CALLED = range(2)
PART = 0.25
"""Of its price, that a position must bring. Played with recorded answers, in batches of 4 to 32 rows that arrived
together or were refilled, 1 lost up to 9 % against one gamma for all; 0 and 0.5 lost 1 to 2 % against this."""

_IDS, _WIDE, _LINE = int64[:, ::1], float64[:, ::1], float64[::1]
_INDICES, _SHARES = int64[::1], float64[:, :, ::1]


@njit_exact(float64(_LINE, float64))
def between(seconds: Floats, at: float) -> float:
    """What an expected number of tokens or rows costs, linear between whole ones.

    Args:
        seconds: [> at] by whole numbers.
        at: at least 0.
    """
    whole = int(at)
    part = at - whole
    if part <= 0.0:
        return float(seconds[whole])
    return float(seconds[whole] + part * (seconds[whole + 1] - seconds[whole]))


@njit_exact(
    types.Tuple((float64, float64))(_IDS, _WIDE, _SHARES, _LINE, _LINE, _WIDE, _INDICES, _LINE)
)
def price(
    facts: Ints,
    survival: Floats,
    shares: Floats,
    verify_s: Floats,
    calls_s: Floats,
    prices: Floats,
    gammas: Ints,
    num_calling: Floats,
) -> tuple[float, float]:
    """Expected tokens of a step, and its seconds.

    Args:
        facts: [6, n].
        survival: [n, G].
        shares: [2, n, G].
        verify_s: [> n * G] seconds by all rows' draft tokens, and what a step costs the host anyway.
        calls_s: [> n] seconds of one draft call by its rows.
        prices: [2, kinds] seconds.
        gammas: [n] tokens asked for.
        num_calling: [G] overwritten: rows expected in each draft call.
    """
    tokens, seconds, total = float(len(gammas)), 0.0, 0.0
    num_calling[:] = 0.0
    for i in range(len(gammas)):
        kind, proposed = facts[KIND, i], 0.0
        for j in range(gammas[i]):
            tokens += survival[i, j]
            proposed += shares[PROPOSED, i, j]
            if facts[USES_MODEL, i]:
                num_calling[j] += shares[CALLED, i, j]
        seconds += prices[ROW_S, kind] + proposed * prices[TOKEN_S, kind]
        total += proposed
    for j in range(len(num_calling)):
        seconds += between(calls_s, num_calling[j])
    return tokens, seconds + between(verify_s, total)


@njit_exact(void(_IDS, _WIDE, _SHARES, _WIDE, _LINE, float64, int64, _INDICES))
def give(
    facts: Ints,
    survival: Floats,
    shares: Floats,
    mean_s: Floats,
    once_s: Floats,
    pay: float,
    longest: int,
    gammas: Ints,
) -> None:
    """Write the positions that each row takes; none where catching up is not worth it.

    A position is asked for where what it brings, with those before it, is worth a part of what is expected to be spent
    on it: later ones may make up for one that does not.

    Args:
        facts: [6, n].
        survival: [n, G].
        shares: [2, n, G].
        mean_s: [2, n] seconds of one more token, on average, and of its draft call.
        once_s: [n] seconds of catching up, per token emitted.
        pay: tokens per second that time must bring.
        longest: draft.
        gammas: [n] overwritten; rows of a fixed gamma keep it.
    """
    for i in range(len(gammas)):
        gammas[i] = facts[CAP, i]
        if facts[IS_FIXED, i]:
            continue
        most, gammas[i] = min(gammas[i], longest), 0
        gained, emitted = 0.0, 1.0
        # Of the positions since the last one that is taken.
        kept, spent = 0.0, 0.0
        for j in range(most):
            kept += survival[i, j]
            spent += pay * (
                shares[PROPOSED, i, j] * mean_s[0, i] + shares[CALLED, i, j] * mean_s[1, i]
            )
            if kept > PART * spent:
                gained += kept - spent
                emitted += kept
                gammas[i], kept, spent = j + 1, 0.0, 0.0
        if once_s[i] > 0.0 and not gained > pay * once_s[i] * emitted:
            gammas[i] = 0


@njit_exact(
    types.Tuple((int64, float64, float64))(
        _IDS, _WIDE, _SHARES, _LINE, _LINE, _WIDE, _LINE, _LINE, float64, _WIDE, _IDS
    )
)
def predict(
    facts: Ints,
    survival: Floats,
    shares: Floats,
    verify_s: Floats,
    calls_s: Floats,
    prices: Floats,
    once_s: Floats,
    scales: Floats,
    time_left_s: float,
    figures: Floats,
    gammas: Ints,
) -> tuple[int, float, float]:
    """Write what every longest draft brings; the floor, and tokens and tabled seconds of a plain step.

    Args:
        facts: [6, n] of the rows.
        survival: [n, G].
        shares: [2, n, G].
        verify_s: [> n * G] seconds by all rows' draft tokens, and what a step costs the host anyway.
        calls_s: [> n] seconds of one draft call by its rows.
        prices: [2, kinds] seconds.
        once_s: [n] seconds of catching up, per token emitted.
        scales: [G + 1] measured over tabled time.
        time_left_s: until the earliest deadline; infinite without one.
        figures: [5, G + 1] overwritten.
        gammas: [G + 1, n] overwritten.
    """
    width, num_rows = gammas.shape
    num_calling, bare = np.empty(width - 1), np.zeros(num_rows, np.int64)
    mean_s = np.zeros((2, num_rows))
    num_positions = num_rows * (width - 1)
    token_s = (verify_s[num_positions] - verify_s[0]) / num_positions
    floor = 0
    for i in range(num_rows):
        if facts[IS_FIXED, i]:
            bare[i] = facts[CAP, i]
            floor = max(floor, bare[i])
        mean_s[0, i] = token_s + prices[TOKEN_S, facts[KIND, i]]
        if facts[USES_MODEL, i]:
            mean_s[1, i] = calls_s[num_rows] / num_rows
    plain_tokens, plain_s = price(
        facts, survival, shares, verify_s, calls_s, prices, bare, num_calling
    )
    pay = plain_tokens / (plain_s * scales[floor])
    for _ in range(2):
        best_rate = 0.0
        for longest in range(width):
            give(facts, survival, shares, mean_s, once_s, pay, longest, gammas[longest])
            tokens, table_s = price(
                facts, survival, shares, verify_s, calls_s, prices, gammas[longest], num_calling
            )
            for i in range(num_rows):
                if gammas[longest, i] > 0 and once_s[i] > 0.0:
                    table_s += once_s[i] * (1.0 + survival[i, : gammas[longest, i]].sum())
            figures[TOKENS, longest] = tokens
            figures[TABLE_S, longest] = table_s
            figures[SECONDS, longest] = figures[TABLE_S, longest] * scales[longest]
        is_in_time = figures[SECONDS, floor] <= time_left_s
        for longest in range(width):
            is_late = is_in_time and figures[SECONDS, longest] > time_left_s
            # Where no row takes so many, it is the choice of a shorter one.
            if longest < floor or is_late or gammas[longest].max() < longest:
                figures[SECONDS, longest] = np.inf
            best_rate = max(best_rate, figures[TOKENS, longest] / figures[SECONDS, longest])
        # At the best rate that these gammas reach, fewer may pay.
        pay = best_rate
    for longest in range(width):
        for i in range(num_rows):
            bare[i] = min(longest, facts[CAP, i])
        tokens, table_s = price(
            facts, survival, shares, verify_s, calls_s, prices, bare, num_calling
        )
        figures[FIXED_TOKENS, longest] = tokens
        figures[FIXED_S, longest] = table_s * scales[longest]
    return floor, plain_tokens, plain_s
