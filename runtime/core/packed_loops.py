"""The loops of a choice of gammas where engines pack rows: a further token of one row has a price of its own.

A verification costs by the total of tokens, and a draft call by the rows that still draft. Positions are taken in the
order of what they bring for their price, and for every longest draft as many of them as give the best rate: prices need
not rise with the total, so that every number of them is tried. ``core.forecast`` says what is computed; one file,
because the functions call each other (``engines.compiled``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void

from engines.compiled import rule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Rows of ``facts``, ``figures`` and ``prices``, as in ``choice_loops``.
CAP, IS_FIXED, USES_MODEL, KIND = range(4)
TOKENS, SECONDS, TABLE_S, FIXED_TOKENS, FIXED_S = range(5)
ROW_S, TOKEN_S = range(2)
LEAST_PRICE_S = 1e-12

_IDS, _WIDE, _LINE = int64[:, ::1], float64[:, ::1], float64[::1]
_FLAGS, _INDICES = boolean[::1], int64[::1]
_READ_ONLY = types.Array(float64, 1, "C", readonly=True)


@rule(types.Tuple((float64, float64, int64))(_IDS, _WIDE, _LINE, _WIDE, _INDICES, _INDICES))
def price(
    facts: Ints, survival: Floats, calls_s: Floats, prices: Floats, gammas: Ints, num_calling: Ints
) -> tuple[float, float, int]:
    """Expected tokens of a step, its seconds but for the verification, and its draft tokens.

    Args:
        facts: [6, n].
        survival: [n, G].
        calls_s: [> n] seconds of one draft call by its rows.
        prices: [2, kinds] seconds.
        gammas: [n].
        num_calling: [G] overwritten: rows in each draft call.
    """
    tokens, seconds, total = float(len(gammas)), 0.0, 0
    num_calling[:] = 0
    for i in range(len(gammas)):
        kind, gamma = facts[KIND, i], gammas[i]
        seconds += prices[ROW_S, kind] + gamma * prices[TOKEN_S, kind]
        total += gamma
        for j in range(gamma):
            tokens += survival[i, j]
            num_calling[j] += facts[USES_MODEL, i]
    for j in range(len(num_calling)):
        seconds += calls_s[num_calling[j]]
    return tokens, seconds, total


@rule(void(_IDS, _WIDE, _LINE, _LINE, float64, int64, _INDICES))
def limit(
    facts: Ints,
    survival: Floats,
    mean_s: Floats,
    once_s: Floats,
    pay: float,
    longest: int,
    most: Ints,
) -> None:
    """Write how many positions of each row may be taken: none where catching up is not worth it.

    Args:
        facts: [6, n].
        survival: [n, G].
        mean_s: [n] seconds of one more token, on average.
        once_s: [n] seconds per step of catching up.
        pay: tokens per second that time must bring.
        longest: draft.
        most: [n] overwritten; 0 for rows of a fixed gamma.
    """
    for i in range(len(most)):
        most[i] = 0 if facts[IS_FIXED, i] else min(longest, facts[CAP, i])
        if once_s[i] > 0.0:
            gained = 0.0
            for j in range(most[i]):
                gained += max(survival[i, j] - pay * mean_s[i], 0.0)
            if not gained > pay * once_s[i]:
                most[i] = 0


@rule(
    types.Tuple((float64, float64))(
        _IDS, _WIDE, _LINE, _LINE, _WIDE, _LINE, _INDICES, _INDICES, _INDICES, _INDICES
    )
)
def take(
    facts: Ints,
    survival: Floats,
    verify_s: Floats,
    calls_s: Floats,
    prices: Floats,
    once_s: Floats,
    order: Ints,
    most: Ints,
    gammas: Ints,
    num_calling: Ints,
) -> tuple[float, float]:
    """Give rows, beyond the gammas they have, the positions of the best rate; the step's tokens and tabled seconds.

    Args:
        facts: [6, n].
        survival: [n, G].
        verify_s: [> n * G] seconds by all rows' draft tokens.
        calls_s: [> n] seconds of one draft call by its rows.
        prices: [2, kinds] seconds.
        once_s: [n] seconds per step of catching up.
        order: [n * G] positions of all rows, the best first.
        most: [n] positions that may be taken of each row.
        gammas: [n] those of rows of a fixed gamma; grows.
        num_calling: [G] overwritten.
    """
    width = survival.shape[1]
    tokens, other_s, total = price(facts, survival, calls_s, prices, gammas, num_calling)
    seconds = other_s + verify_s[total]
    best, best_tokens, best_s = 0, tokens, seconds
    for place in range(len(order)):
        i, j = divmod(order[place], width)
        if j >= most[i]:
            continue
        tokens += survival[i, j]
        total += 1
        other_s += prices[TOKEN_S, facts[KIND, i]]
        if j == 0:
            other_s += once_s[i]
        if facts[USES_MODEL, i]:
            other_s += calls_s[num_calling[j] + 1] - calls_s[num_calling[j]]
            num_calling[j] += 1
        seconds = other_s + verify_s[total]
        if tokens * best_s > best_tokens * seconds:
            best, best_tokens, best_s = place + 1, tokens, seconds
    for place in range(best):
        i, j = divmod(order[place], width)
        gammas[i] += j < most[i]
    return best_tokens, best_s


@rule(
    types.Tuple((int64, float64, float64))(
        _IDS, _WIDE, _LINE, _LINE, _WIDE, _LINE, _READ_ONLY, float64, _WIDE, _IDS
    )
)
def predict(
    facts: Ints,
    survival: Floats,
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
        verify_s: [> n * G] seconds by all rows' draft tokens, and what a step costs the host anyway.
        calls_s: [> n] seconds of one draft call by its rows.
        prices: [2, kinds] seconds.
        once_s: [n] seconds per step of catching up.
        scales: [G + 1] measured over tabled time.
        time_left_s: until the earliest deadline; infinite without one.
        figures: [5, G + 1] overwritten.
        gammas: [G + 1, n] overwritten.
    """
    width, num_rows = gammas.shape
    most, num_calling = np.empty(num_rows, np.int64), np.empty(width - 1, np.int64)
    bare, mean_s = np.zeros(num_rows, np.int64), np.empty(num_rows)
    floor = ceiling = 0
    is_lagging = False
    num_positions = num_rows * (width - 1)
    token_s = (verify_s[num_positions] - verify_s[0]) / num_positions
    worth = np.empty((num_rows, width - 1))
    for i in range(num_rows):
        ceiling = max(ceiling, facts[CAP, i])
        if facts[IS_FIXED, i]:
            bare[i] = facts[CAP, i]
            floor = max(floor, bare[i])
        is_lagging |= once_s[i] > 0.0
        mean_s[i] = max(token_s + prices[TOKEN_S, facts[KIND, i]], LEAST_PRICE_S)
        if facts[USES_MODEL, i]:
            mean_s[i] += calls_s[num_rows] / num_rows
        for j in range(width - 1):
            worth[i, j] = -survival[i, j] / mean_s[i]
    # Survival falls with the position; of equal ones the first comes first.
    order = np.argsort(worth.ravel(), kind="mergesort")
    plain_tokens, plain_s, total = price(facts, survival, calls_s, prices, bare, num_calling)
    plain_s += verify_s[total]
    pay = plain_tokens / (plain_s * scales[floor])
    for _ in range(2):
        best_rate = 0.0
        for longest in range(width):
            limit(facts, survival, mean_s, once_s, pay, longest, most)
            gammas[longest] = bare
            tokens, table_s = take(
                facts, survival, verify_s, calls_s, prices, once_s, order, most, gammas[longest],
                num_calling,
            )  # fmt: skip
            figures[TOKENS, longest] = tokens
            figures[TABLE_S, longest] = table_s
            figures[SECONDS, longest] = table_s * scales[longest]
        is_in_time = figures[SECONDS, floor] <= time_left_s
        for longest in range(width):
            is_late = is_in_time and figures[SECONDS, longest] > time_left_s
            # Where no row takes so many, it is the choice of a shorter one.
            if longest > ceiling or is_late or gammas[longest].max() < longest or longest < floor:
                figures[SECONDS, longest] = np.inf
            best_rate = max(best_rate, figures[TOKENS, longest] / figures[SECONDS, longest])
        # At the best rate, catching up may pay for fewer rows, or more.
        pay = best_rate
        if not is_lagging:
            break
    for longest in range(width):
        for i in range(num_rows):
            most[i] = min(longest, facts[CAP, i])
        tokens, table_s, total = price(facts, survival, calls_s, prices, most, num_calling)
        figures[FIXED_TOKENS, longest] = tokens
        figures[FIXED_S, longest] = (table_s + verify_s[total]) * scales[longest]
    return floor, plain_tokens, plain_s
