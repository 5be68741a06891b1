"""Times calls in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from outrider.engines.base import Engine, Span
from outrider.runtime.calibration.fitting import Seconds

Call = Callable[[], object]
Clock = Callable[[], float]

TYPICAL = 0.25  # quantile of a call's times: other work only adds time, so that it is nearer than the median
LEAST_S = 1e-9  # of a call: a clock that is too coarse for it must not make it free


def extend_call(
    engine: Engine, rows: int, tokens: int, *, times: int = 1, is_tree: bool = False
) -> Call:
    """Return a call that extends so many free slots by so many tokens each, ``times`` times, with all logits.

    The tokens of a tree are all children of its root: a pass costs by its width alone.
    """
    parents = (0,) * (tokens - 1) if is_tree else None
    # As a verification: its drafts are open.
    num_settled = max(1, tokens - (engine.limits.max_open or 0))
    # A head reads no pair of a text's first token, and has no logits behind it beside others.
    num_logits = 1 if engine.limits.reads_features else tokens
    spans = [
        Span(
            slot=slot,
            start=0,
            tokens=(0,) * tokens,
            num_logits=num_logits,
            parents=parents,
            num_settled=num_settled,
        )
        for slot in range(rows)
    ]
    return lambda: [engine.extend(spans) for _ in range(times)]


def timed(calls: Sequence[Call], clock: Clock) -> list[float]:
    """Return the seconds of each call, made once in this order."""
    times = []
    for call in calls:
        began = clock()
        call()
        times.append(max(clock() - began, LEAST_S))
    return times


def typical(rounds: Sequence[Sequence[float]]) -> Seconds:
    """Return [calls] float64 typical seconds of [rounds][calls]."""
    return np.asarray(np.quantile(rounds, TYPICAL, axis=0), dtype=np.float64)


def time_calls(
    calls: Sequence[Call], num_rounds: int, clock: Clock, most_s: float = math.inf
) -> Seconds:
    """Return [calls] float64 typical seconds; a round that allocates and plans goes before.

    After ``most_s`` no further round is begun, but one.
    """
    until = clock() + most_s
    timed(calls, clock)
    rounds = [timed(calls, clock)]
    while len(rounds) < num_rounds and clock() < until:
        rounds.append(timed(calls, clock))
    return typical(rounds)
