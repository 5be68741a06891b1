"""Measures what the steps of a bundle cost on this machine.

Times are those of real calls of the engines over the shapes that occur when requests are served. Calls of target and
draft alternate as they do in service, where each pushes the other's weights out of the processor's caches. All calls
are made in rounds; a table of which two halves disagree says so, and served steps correct it. A start waits for all
this, so that of slow models little is measured: one row at several widths, from which follow more rows where a call
costs by its tokens in all.
The engines are the caller's to close and must not serve: a cache that grew for a long context makes calls slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from outrider.engines.base import Engine, Span
from outrider.engines.kv_cache import MIN_SPAN, capacities
from outrider.engines.sampling.base import Sampler
from outrider.runtime.calibration.fitting import Seconds, fit_model, monotone
from outrider.runtime.calibration.host import measure_host
from outrider.runtime.calibration.reads import measure_reads, read_everywhere
from outrider.runtime.calibration.timing import Call, Clock, extend_call, time_calls, timed, typical
from outrider.runtime.calibration.trees import measure_trees
from outrider.runtime.core.text import Decoder
from outrider.runtime.gamma.costs import CostTable, ModelCosts

# Rows, and tokens per row (drafts of 0, 1, 2, 4, 8 and 16): between them times are nearly linear.
BATCHES, SPANS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 5, 9, 17)
DRAFT_CALLS = 2  # behind one of the target: the first finds the target's weights in the caches, the next its own
CATCH_UP_SPANS = (2, 16, 64, 256)  # tokens that a draft model missed, up to all that one call takes
LONG_CONTEXT = 480  # tokens of the second point of the line through capacity: four times the first, beyond the noise
LONG_ROWS = 4  # of both points: every row adds to the difference
WARM_SHARE = 0.2  # of the time, for one call of every shape; larger batches are derived, as two rounds follow
TREE_SHARE = 0.2  # of the time, after which passes over trees begin no second number of rows
READ_SHARE = 0.2  # of the time, after which reads of one engine begin no second number of rows
LENGTH_SHARE = 0.1  # of the time, for each of the two points of the line through capacity
LENGTH_CALLS = 4  # that must fit in it: a difference between fewer is of the machine's noise
CATCH_UP_SHARE = 0.2  # of the time, within which a longer span has to end; times are linear in it
LEAST_ROUNDS = 2  # made however long they take: fewer could not disagree
AGREEING = 0.8  # share of the calls that must agree: fitting corrects a few disturbed ones by their neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long measuring may take.

    Attributes:
        total_s: after this many seconds no further batch size, and no further round, is begun.
        repeats: rounds at most.
    """

    total_s: float = 2.0
    repeats: int = 8


def calibrate(
    *,
    target: Engine,
    draft: Engine | None,
    sampler: Sampler,
    decoder: Decoder,
    max_gamma: int,
    budget: Budget | None = None,
    clock: Clock = time.perf_counter,
) -> CostTable:
    """Measure everything a choice of gamma needs, with engines whose slots are free.

    Sampler and decoder are those that will serve; ``max_gamma`` is the widest verification less one.
    """
    budget = budget or Budget()
    engines = [target] if draft is None else [target, draft]
    read_s = READ_SHARE * budget.total_s
    reads = [measure_reads(target, read_s, clock)]
    if draft is not None:
        reads.append(measure_reads(draft, read_s, clock, target=target))
    for engine in engines:
        read_everywhere(engine)
    costs, disagreement = _measure_grids(engines, max_gamma, budget, clock)
    trees = measure_trees(target, costs[0], TREE_SHARE * budget.total_s, clock)
    # From here on the caches grow.
    costs = [
        replace(of_model, position_s=_position_s(engine, budget, clock))
        for of_model, engine in zip(costs, engines, strict=True)
    ]
    catch_up = None if draft is None else _measure_catch_up(draft, budget, clock)
    spans_of = [costs[0]] if catch_up is None else [costs[0], catch_up]
    costs = [
        _with_rows(of_model, spans, engine.limits.max_batch) if engine.packs_rows else of_model
        for of_model, spans, engine in zip(costs, spans_of, engines, strict=True)
    ]
    return CostTable(
        target=costs[0],
        draft=None if draft is None else costs[1],
        catch_up=catch_up,
        host=measure_host(target.limits, sampler, decoder, max_gamma, clock),
        capacities=capacities(target.limits),
        disagreement=disagreement,
        trees=trees,
        read=reads[0],
        draft_read=None if draft is None else reads[1],
    )


def _measure_grids(
    engines: Sequence[Engine], max_gamma: int, budget: Budget, clock: Clock
) -> tuple[list[ModelCosts], float]:
    """Return the costs of target and draft, and the share by which two halves of the rounds disagree."""
    began = clock()
    widest = max(MIN_SPAN, min(max_gamma + 1, engines[0].limits.max_extend))
    spans = (*(n for n in SPANS if n < widest), widest)
    most = min(engine.limits.max_batch for engine in engines)
    batches: list[int] = []
    calls: list[Call] = []
    for rows in (*(n for n in BATCHES if n < most), most):
        if batches and clock() > began + WARM_SHARE * budget.total_s:
            break
        turns = [call for tokens in spans for call in _turn(engines, rows, tokens)]
        timed(turns, clock)
        batches.append(rows)
        calls += turns
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or (
        len(rounds) < budget.repeats and clock() < began + budget.total_s
    ):
        rounds.append(timed(calls, clock))
    grid = typical(rounds).reshape(len(batches), len(spans), len(engines))
    sizes = [capacities(engine.limits)[0] for engine in engines]
    costs = [fit_model(grid[:, :, 0], batches, spans, sizes[0])]
    if len(engines) > 1:
        draft_s = grid[:, :, 1].mean(axis=1, keepdims=True) / DRAFT_CALLS
        costs.append(fit_model(draft_s, batches, (1,), sizes[1]))
    return costs, _disagreement(rounds)


def _turn(engines: Sequence[Engine], rows: int, tokens: int) -> list[Call]:
    """Return a call of the target, and one that drafts behind it: some calls of one token per row."""
    drafts = [extend_call(draft, rows, 1, times=DRAFT_CALLS) for draft in engines[1:]]
    return [extend_call(engines[0], rows, tokens), *drafts]


def _disagreement(rounds: Sequence[Sequence[float]]) -> float:
    """Return the share by which every other round is apart from those between, for most of the calls.

    A machine that was slower in one half altogether misleads no choice, and is left out.
    """
    apart = np.log(typical(rounds[0::2]) / typical(rounds[1::2]))
    return float(np.quantile(np.abs(apart - np.median(apart)), AGREEING))


def _position_s(engine: Engine, budget: Budget, clock: Clock) -> float:
    """Return what a further cache position costs a row: the same call before and after the cache grew.

    It is 0 where calls take too long for that; steps of all lengths are then dearer alike than the table says.
    """
    limits, sizes = engine.limits, capacities(engine.limits)
    length = min(LONG_CONTEXT, limits.max_context)
    grown = next(size for size in sizes if size >= length) - sizes[0]
    if grown <= 0:
        return 0.0
    rows, most_s = min(LONG_ROWS, limits.max_batch), LENGTH_SHARE * budget.total_s
    calls = [extend_call(engine, rows, MIN_SPAN)]
    if LENGTH_CALLS * timed(calls, clock)[0] > most_s:
        return 0.0
    short_s = time_calls(calls, budget.repeats, clock, most_s)
    _lengthen(engine, length)
    long_s = time_calls(calls, budget.repeats, clock, most_s)
    return max(0.0, float(long_s[0] - short_s[0])) / (grown * rows)


def _with_rows(costs: ModelCosts, spans: ModelCosts, most: int) -> ModelCosts:
    """Return costs with the rows up to ``most`` that were not measured, from those of one row's ``spans``."""
    missing = [n for n in (*(n for n in BATCHES if n < most), most) if n > costs.batches[-1]]
    if not missing:
        return costs
    rows = [
        [spans.extend_s(1, n * width, costs.capacity) for width in costs.tokens] for n in missing
    ]
    grid = monotone(np.array([*costs.seconds, *rows]))
    seconds = tuple(tuple(row) for row in grid.tolist())
    return replace(costs, batches=(*costs.batches, *missing), seconds=seconds)


def _lengthen(engine: Engine, length: int) -> None:
    """Make slot 0 hold so many tokens: zeros where the engine takes what others computed, which costs nothing."""
    limits = engine.limits
    if engine.token_bytes:
        engine.extend([Span(slot=0, start=0, tokens=(0,), num_logits=0, num_settled=1)])
        *axes, _, size = engine.read_slot(0, 0, 1).shape
        engine.write_slot(0, 1, np.zeros((*axes, length - 1, size), dtype=np.float32))
        return
    for first in range(0, length, limits.max_extend):
        count = min(limits.max_extend, length - first)
        span = Span(slot=0, start=first, tokens=(0,) * count, num_logits=0, num_settled=count)
        engine.extend([span])


def _measure_catch_up(draft: Engine, budget: Budget, clock: Clock) -> ModelCosts:
    """Return the costs of one row of many tokens whose logits nobody wants."""
    longest = min(draft.limits.max_extend, draft.limits.max_context)
    until = clock() + CATCH_UP_SHARE * budget.total_s
    spans: list[int] = []
    seconds: list[Seconds] = []
    # One after the other: a short call after a long one takes three times as long (0.4 ms for 0.14, demo pair).
    for tokens in (*(n for n in CATCH_UP_SPANS if n < longest), longest):
        left_s = until - clock()
        # A span is read twice at least, and takes about as long a token as the one before.
        if len(spans) > 1 and left_s < 2.0 * tokens / spans[-1] * float(seconds[-1][0]):
            break
        span = Span(slot=0, start=0, tokens=(0,) * tokens, num_logits=0, num_settled=tokens)
        call = partial(draft.extend, [span])
        seconds.append(time_calls([call], budget.repeats, clock, left_s))
        spans.append(tokens)
    return fit_model(np.stack(seconds, axis=1), (1,), spans, capacities(draft.limits)[0])
