"""Measures what the steps of a bundle cost on this machine.

Times are those of real calls of the engines over the shapes that occur when requests are served.
Calls of target and draft alternate as they do in service, where each pushes the other's weights out
of the processor's caches. Rounds over all calls are interleaved, so that whatever else the machine does
meets all alike; where two halves of the rounds disagree all the same, more are made, and a table that
stays in doubt says so. The engines measured here are the caller's to close: a cache that grew for a
long context never shrinks, so they must not serve afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from outrider.engines.base import Engine, Span
from outrider.engines.kv_cache import FIRST_CAPACITY, MIN_SPAN, capacities
from outrider.engines.sampling.base import Sampler
from outrider.runtime.calibration.fitting import monotone, proportional
from outrider.runtime.calibration.host_costs import measure_host
from outrider.runtime.calibration.tree_costs import time_trees
from outrider.runtime.core.text import Decoder
from outrider.runtime.gamma.costs import MOST_DISAGREEMENT, CostTable, ModelCosts

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SPANS = (1, 2, 3, 5, 9, 17)
DRAFT_SPANS = (1, 2, 5)
# Draft calls in a row between two of the target.
DRAFT_CALLS = 2
CATCH_UP_SPANS = (2, 16, 64, 256)
# Context of the second point of the line through capacity; long enough to lie above its noise.
LONG_CONTEXT = 480
LONG_ROWS = 8
# Shares of the time: larger batches are begun until the first is spent on one call each; trees may take the second.
WARM_SHARE = 0.3
TREE_SHARE = 0.2
LEAST_ROUNDS = 2
"""Rounds that are made however long they take: fewer could not disagree."""
TYPICAL = 0.25
"""Quantile of a call's times. Whatever else runs on the machine only ever adds time, so that the lower
quartile is closer to the call's own cost than the median is."""


Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long measuring may take.

    Attributes:
        total_s: after this many seconds no further batch size, and no further round, is begun.
        repeats: rounds at most, before it is asked whether they agree.
        attempts: times that so many rounds are made where they do not.
    """

    total_s: float = 6.0
    repeats: int = 8
    attempts: int = 3


@dataclass(slots=True, kw_only=True)
class _Model:
    """One model's calls by batch and tokens, and their times.

    Attributes:
        times: by (batch, tokens), seconds of every round.
    """

    engine: Engine
    spans: tuple[int, ...]
    calls_at_once: int = 1
    times: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def call(self, batch: int, tokens: int) -> None:
        """One call, as often as it is made at once."""
        extend = _extend_call(self.engine, batch, tokens)
        for _ in range(self.calls_at_once):
            extend()

    @property
    def batches(self) -> list[int]:
        """Rows that were measured, ascending."""
        return sorted({batch for batch, _ in self.times})

    def costs(self, position_s: float) -> ModelCosts:
        """What was measured, made monotone."""
        batches = self.batches
        typical = [
            [_typical(self.times[batch, tokens]) / self.calls_at_once for tokens in self.spans]
            for batch in batches
        ]
        grid = monotone(proportional(np.array(typical), batches, self.spans))
        return ModelCosts(
            batches=tuple(batches),
            tokens=self.spans,
            seconds=tuple(tuple(row) for row in grid.tolist()),
            capacity=capacities(self.engine.limits)[0],
            position_s=position_s,
        )


def calibrate(
    *,
    target: Engine,
    draft: Engine | None,
    sampler: Sampler,
    decoder: Decoder,
    max_gamma: int,
    budget: Budget | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure everything a choice of gamma needs.

    Args:
        target: engine whose slots are free.
        draft: likewise, or None.
        sampler: the one that will serve.
        decoder: the one that will serve.
        max_gamma: widest verification less one.
        budget: how long to take.
        clock: seconds.
    """
    budget = budget or Budget()
    widest = max(MIN_SPAN, min(max_gamma + 1, target.limits.max_extend))
    spans = (*(n for n in SPANS if n < widest), widest)
    models = [_Model(engine=target, spans=spans)]
    if draft is not None:
        models.append(_Model(engine=draft, spans=DRAFT_SPANS, calls_at_once=DRAFT_CALLS))
    disagreement = _measure_grids(models, budget, clock)
    trees = time_trees(target, models[0].batches, TREE_SHARE * budget.total_s, clock)
    # From here on the caches grow.
    costs = [model.costs(_position_s(model.engine, budget.repeats, clock)) for model in models]
    return CostTable(
        target=costs[0],
        draft=None if draft is None else costs[1],
        catch_up=None if draft is None else _measure_catch_up(draft, budget.repeats, clock),
        host=measure_host(target.limits, sampler, decoder, max_gamma, clock),
        capacities=capacities(target.limits),
        disagreement=disagreement,
        trees=trees.costs(costs[0]),
    )


def _measure_grids(models: Sequence[_Model], budget: Budget, clock: Callable[[], float]) -> float:
    """Time every call in rounds; how far two halves of the rounds disagree."""
    began = clock()
    order = _order(models, began + WARM_SHARE * budget.total_s, clock)
    disagreement = np.inf
    for attempt in range(1, budget.attempts + 1):
        for number in range(max(budget.repeats, LEAST_ROUNDS)):
            is_late = clock() > began + attempt * budget.total_s
            if is_late and (number >= LEAST_ROUNDS or attempt > 1):
                break
            for model, batch, tokens in order:
                call_began = clock()
                model.call(batch, tokens)
                # A clock too coarse for the call must not make it free.
                taken_s = max(clock() - call_began, 1e-9)
                model.times.setdefault((batch, tokens), []).append(taken_s)
        disagreement = _disagreement([one for model in models for one in model.times.values()])
        if disagreement <= MOST_DISAGREEMENT:
            break
    return disagreement


def _order(
    models: Sequence[_Model], warm_until: float, clock: Callable[[], float]
) -> list[tuple[_Model, int, int]]:
    """Calls of one round, after one call each: the target's and the draft's in turns.

    Small batches come first; those whose turn is after ``warm_until`` are left to extrapolation.
    """
    most = min(model.engine.limits.max_batch for model in models)
    order: list[tuple[_Model, int, int]] = []
    for batch in (*(one for one in BATCHES if one < most), most):
        if order and clock() > warm_until:
            break
        calls: list[tuple[_Model, int, int]] = []
        for index, tokens in enumerate(models[0].spans):
            calls.append((models[0], batch, tokens))
            calls += [(one, batch, one.spans[index % len(one.spans)]) for one in models[1:]]
        # A model with more lengths than the target has the rest at the end.
        seen = {(id(model), tokens) for model, _, tokens in calls}
        for model in models[1:]:
            calls += [(model, batch, n) for n in model.spans if (id(model), n) not in seen]
        for model, rows, tokens in calls:
            model.call(rows, tokens)
        order += calls
    return order


def _disagreement(times: Sequence[Sequence[float]]) -> float:
    """How far apart every other round is from those between, as a share that four of five calls keep.

    A machine that was slower in one half altogether misleads no choice, and is left out.
    """
    halves = np.array([[_typical(one[0::2]), _typical(one[1::2])] for one in times])
    apart = np.log(halves[:, 0] / halves[:, 1])
    return float(np.quantile(np.abs(apart - np.median(apart)), 0.8))


def _typical(times: Sequence[float]) -> float:
    return float(np.quantile(times, TYPICAL))


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    """Typical seconds of one call; one more goes before and is not counted."""
    times = []
    for _ in range(repeats + 1):
        began = clock()
        call()
        times.append(max(clock() - began, 1e-9))
    return _typical(times[1:])


def _position_s(engine: Engine, repeats: int, clock: Callable[[], float]) -> float:
    """What a further cache position costs a row: the same call before and after the cache grew."""
    limits = engine.limits
    start = min(LONG_CONTEXT, limits.max_context - MIN_SPAN)
    sizes = capacities(limits)
    grown = next(size for size in sizes if size >= start + MIN_SPAN) - sizes[0]
    if grown <= 0:
        return 0.0
    rows = min(LONG_ROWS, limits.max_batch)
    call = _extend_call(engine, rows, MIN_SPAN)
    short_s = _time(call, repeats, clock)
    for first in range(0, start, limits.max_extend):
        tokens = (0,) * min(limits.max_extend, start - first)
        engine.extend([Span(slot=0, start=first, tokens=tokens, num_logits=0)])
    engine.extend([Span(slot=0, start=start, tokens=(0,) * MIN_SPAN, num_logits=0)])
    long_s = _time(call, repeats, clock)
    return max(0.0, long_s - short_s) / (grown * rows)


def _measure_catch_up(engine: Engine, repeats: int, clock: Callable[[], float]) -> ModelCosts:
    longest = min(engine.limits.max_extend, engine.limits.max_context)
    spans = (*(n for n in CATCH_UP_SPANS if n < longest), longest)
    times = [_time(_extend_call(engine, 1, n, is_judged=False), repeats, clock) for n in spans]
    grid = monotone(proportional(np.array([times]), (1,), spans))
    return ModelCosts(
        batches=(1,),
        tokens=spans,
        seconds=(tuple(grid[0].tolist()),),
        capacity=FIRST_CAPACITY,
        position_s=0.0,
    )


def _extend_call(engine: Engine, batch: int, tokens: int, *, is_judged: bool = True) -> Call:
    num_logits = tokens if is_judged else 0
    spans = [
        Span(slot=slot, start=0, tokens=(0,) * tokens, num_logits=num_logits)
        for slot in range(batch)
    ]
    return lambda: engine.extend(spans)
