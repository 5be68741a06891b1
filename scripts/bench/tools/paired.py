"""Several ways to do the same work, timed in turns within one process, so that a disturbance meets all of them.

A round gives every way the same pieces of work; on each piece the ways follow one another at once, in an order that
rotates and turns round, so that a drift of the machine cancels. Ratios are of one round, intervals Student's t on their
logarithms. Ways that compete for "best" drop out once they are clearly behind: the time is for those that matter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio of speeds with its 95 % interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Bounds of a measurement.

    Attributes:
        seconds: no further round is begun that would end later, once there are ``least_rounds``.
        least_rounds: counted rounds at least; one more goes before and warms up.
        most_rounds: counted rounds at most.
        search_rounds: counted rounds before contenders may drop out.
        behind: share of the leader's speed below which a contender drops out.
    """

    seconds: float
    least_rounds: int = 5
    most_rounds: int = 40
    search_rounds: int = 2
    behind: float = 0.93


Run = Callable[[str, int, int], tuple[int, float]]
"""Way, piece and round to units done and seconds taken."""


def take_turns(
    run: Run,
    ways: Sequence[str],
    *,
    num_pieces: int,
    contenders: Sequence[str],
    turns: Turns,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Units per second of every way, round by round; the lists of contenders that dropped out are shorter.

    Args:
        run: does one piece of work in one way.
        ways: names.
        num_pieces: pieces of a round.
        contenders: those of the ways that only the best is wanted of.
        turns: how long to go on.
        clock: seconds that ``turns`` counts in.
    """
    rates: dict[str, list[float]] = {way: [] for way in ways}
    left = list(ways)
    began, took_s = clock(), 0.0
    for number in range(turns.most_rounds + 1):
        round_began = clock()
        if number > turns.least_rounds and round_began - began + took_s > turns.seconds:
            break
        done = dict.fromkeys(left, 0)
        seconds = dict.fromkeys(left, 0.0)
        for piece in range(num_pieces):
            for way in _order(left, number * num_pieces + piece):
                units, spent_s = run(way, piece, number)
                done[way] += units
                seconds[way] += spent_s
        took_s = clock() - round_began
        if number:
            for way in left:
                rates[way].append(done[way] / seconds[way])
        if number >= turns.search_rounds:
            left = _still_in(left, contenders, rates, turns.behind)
    return rates


def best_of(contenders: Sequence[str], rates: Mapping[str, Sequence[float]]) -> str:
    """The fastest in hindsight among those that stayed to the end."""
    longest = max(len(rates[way]) for way in contenders)
    stayed = [way for way in contenders if len(rates[way]) == longest]
    return max(stayed, key=lambda way: _mean_log(rates[way]))


def interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Ratio of two ways' speeds over the rounds that both ran: geometric mean and Student's interval."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    middle = statistics.fmean(logs)
    half = math.inf
    if len(logs) > 1:
        quantile = float(student.ppf((1.0 + CONFIDENCE) / 2.0, len(logs) - 1))
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(min(middle + half, 700.0)),
    )


def _order(ways: Sequence[str], number: int) -> list[str]:
    """Rotated by one each time, and the other way round every second time."""
    turn = (number // 2) % len(ways)
    order = [*ways[turn:], *ways[:turn]]
    return order[::-1] if number % 2 else order


def _still_in(
    left: Sequence[str],
    contenders: Sequence[str],
    rates: Mapping[str, Sequence[float]],
    behind: float,
) -> list[str]:
    means = {way: _mean_log(rates[way]) for way in left if way in contenders}
    least = max(means.values(), default=0.0) + math.log(behind)
    return [way for way in left if means.get(way, least) >= least]


def _mean_log(rates: Sequence[float]) -> float:
    return statistics.fmean(math.log(rate) for rate in rates)
