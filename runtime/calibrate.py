"""Measures what the steps of a bundle cost on this machine.

Times are those of real calls of the engines over the shapes that occur when requests are
served; what the host and the sampler add is the time of real steps of a worker whose engines answer
at once. The engines measured here are the caller's to close: a cache that grew for a long context
never shrinks, so they must not serve afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engines.base import Engine, EngineLimits, FloatArray, Span
from engines.kv_cache import FIRST_CAPACITY, MIN_SPAN, capacities
from engines.laws import ExactnessMode, Sampler, SamplingLaw
from runtime.core.config import ServerConfig
from runtime.core.costs import CostTable, HostCosts, ModelCosts, RowKind, fit_host, monotone
from runtime.core.params import Event, RequestSpec, SpeculationParams
from runtime.core.text import Decoder
from runtime.worker import Worker

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SPANS = (2, 3, 5, 9, 17)
DRAFT_SPANS = (2, 5)
CATCH_UP_SPANS = (2, 16, 64, 256)
HOST_ROWS = (1, 16)
HOST_GAMMA = 4
HOST_STEPS = 5
# Context of the second point of the line through capacity; long enough to lie above its noise.
LONG_CONTEXT = 480
LONG_ROWS = 8
KINDS = {
    RowKind.GREEDY: (0.0, ExactnessMode.MAX_ACCEPT),
    RowKind.SAMPLED: (1.0, ExactnessMode.MAX_ACCEPT),
    RowKind.STABLE: (1.0, ExactnessMode.SEED_STABLE),
}


Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long measuring may take.

    Attributes:
        total_s: after this many seconds no further batch size, and no further round, is begun.
        repeats: timed calls of each shape at most.
    """

    total_s: float = 6.0
    repeats: int = 7


class StillEngine:
    """An engine that computes nothing: every wanted row of logits is the same.

    Args:
        limits: capacities.
        row: [V] float32.
    """

    def __init__(self, limits: EngineLimits, row: FloatArray, *, max_wanted: int) -> None:
        self._limits = limits
        self._logits = np.tile(row, (limits.max_batch, max_wanted, 1))

    @property
    def limits(self) -> EngineLimits:
        """Capacities."""
        return self._limits

    @property
    def is_row_invariant(self) -> bool:
        """Trivially."""
        return True

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32, the same row everywhere."""
        wanted = max(span.num_logits for span in spans)
        return self._logits[: len(spans), :wanted]

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Nothing lies anywhere."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Nothing lies anywhere."""

    def trim(self, lengths: Sequence[int]) -> None:
        """Holds nothing."""

    def close(self) -> None:
        """Nothing to free."""


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
    began = clock()
    widest = max(MIN_SPAN, min(max_gamma + 1, target.limits.max_extend))
    spans = (*(n for n in SPANS if n < widest), widest)
    first, second = (began + share * budget.total_s for share in (0.7, 1.0))
    target_costs = _measure_model(target, spans, _Timer(clock, budget.repeats, first))
    draft_timer = _Timer(clock, budget.repeats, second)
    return CostTable(
        target=target_costs,
        # Catching up is measured first: the other measurement leaves the cache grown.
        catch_up=None if draft is None else _measure_catch_up(draft, draft_timer),
        draft=None if draft is None else _measure_model(draft, DRAFT_SPANS, draft_timer),
        host=_measure_host(target.limits, sampler, decoder, max_gamma, clock),
        capacities=capacities(target.limits),
    )


class _Timer:
    """Times calls in rounds, so that a disturbance of the machine spreads over all of them.

    Args:
        deadline: on the clock; after it no further round is begun.
    """

    def __init__(self, clock: Callable[[], float], repeats: int, deadline: float) -> None:
        self.clock = clock
        self._repeats = repeats
        self.deadline = deadline

    def typical_s(self, calls: Sequence[Call]) -> list[float]:
        """Lower quartile of each call's seconds; one round more goes before and is not counted.

        Whatever else runs on the machine only ever adds time, so the quartile is closer to the
        call's own cost than the median is.
        """
        times: list[list[float]] = [[] for _ in calls]
        for number in range(self._repeats + 1):
            if number > 1 and self.clock() > self.deadline:
                break
            for call, taken in zip(calls, times, strict=True):
                began = self.clock()
                call()
                taken.append(self.clock() - began)
        # A clock too coarse for the call must not make it free.
        return [max(float(np.quantile(taken[1:], 0.25)), 1e-9) for taken in times]


def _measure_model(engine: Engine, spans: Sequence[int], timer: _Timer) -> ModelCosts:
    """Small batches first; those whose turn comes after the deadline are left to extrapolation."""
    limits = engine.limits
    batches = [batch for batch in BATCHES if batch < limits.max_batch] + [limits.max_batch]
    calls: list[list[Call]] = []
    for batch in batches:
        if calls and timer.clock() > timer.deadline:
            break
        calls.append([_extend_call(engine, batch, tokens) for tokens in spans])
        calls[-1][-1]()
    times = timer.typical_s([call for row in calls for call in row])
    grid = monotone(np.array(times).reshape(len(calls), len(spans)))
    return ModelCosts(
        batches=tuple(batches[: len(calls)]),
        tokens=tuple(spans),
        seconds=tuple(tuple(row) for row in grid.tolist()),
        capacity=capacities(limits)[0],
        position_s=_position_s(engine, timer),
    )


def _position_s(engine: Engine, timer: _Timer) -> float:
    """What a further cache position costs a row: the same call before and after the cache grew."""
    limits = engine.limits
    start = min(LONG_CONTEXT, limits.max_context - MIN_SPAN)
    sizes = capacities(limits)
    grown = next(size for size in sizes if size >= start + MIN_SPAN) - sizes[0]
    if grown <= 0:
        return 0.0
    rows = min(LONG_ROWS, limits.max_batch)
    call = _extend_call(engine, rows, MIN_SPAN)
    (short_s,) = timer.typical_s([call])
    for first in range(0, start, limits.max_extend):
        tokens = (0,) * min(limits.max_extend, start - first)
        engine.extend([Span(slot=0, start=first, tokens=tokens, num_logits=0)])
    engine.extend([Span(slot=0, start=start, tokens=(0,) * MIN_SPAN, num_logits=0)])
    (long_s,) = timer.typical_s([call])
    return max(0.0, long_s - short_s) / (grown * rows)


def _measure_catch_up(engine: Engine, timer: _Timer) -> ModelCosts:
    longest = min(engine.limits.max_extend, engine.limits.max_context)
    spans = (*(n for n in CATCH_UP_SPANS if n < longest), longest)
    times = timer.typical_s([_extend_call(engine, 1, n, is_judged=False) for n in spans])
    grid = monotone(np.array([times]))
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


def _measure_host(
    limits: EngineLimits,
    sampler: Sampler,
    decoder: Decoder,
    max_gamma: int,
    clock: Callable[[], float],
) -> HostCosts:
    """Seconds of steps whose engines take none; the draft is always right, so all is judged."""
    row = np.random.default_rng(0).normal(scale=3.0, size=limits.vocab_size).astype(np.float32)
    gammas = (0, min(HOST_GAMMA, max_gamma))
    still = StillEngine(limits, row, max_wanted=max(MIN_SPAN, gammas[-1] + 1))
    samples = []
    for rows in sorted({min(one, limits.max_batch) for one in HOST_ROWS}):
        for kind in RowKind:
            for gamma in dict.fromkeys(gammas):
                seconds = _host_step_s(still, sampler, decoder, kind, rows, gamma, clock)
                samples.append((kind, rows, gamma, max(seconds, 1e-9)))
    return fit_host(samples)


def _host_step_s(
    still: StillEngine,
    sampler: Sampler,
    decoder: Decoder,
    kind: RowKind,
    rows: int,
    gamma: int,
    clock: Callable[[], float],
) -> float:
    temperature, mode = KINDS[kind]
    worker = Worker(
        target=still,
        draft=still,
        sampler=sampler,
        config=ServerConfig(max_running=rows),
        max_gamma=max(gamma, 1),
        decoder=decoder,
    )
    for index in range(rows):
        spec = RequestSpec(
            internal_id=str(index),
            request_id=str(index),
            prompt_tokens=(0,),
            law=SamplingLaw(temperature=temperature),
            seed=index,
            max_tokens=(HOST_STEPS + 2) * (gamma + 1),
            speculation=SpeculationParams(drafter="model", gamma=gamma, mode=mode),
        )
        worker.submit(spec, _ignore)
    worker.run_step()
    times = []
    for _ in range(HOST_STEPS):
        began = clock()
        worker.run_step()
        times.append(clock() - began)
    return float(np.quantile(times, 0.25))


def _ignore(event: Event) -> None:
    """Nobody reads what a calibration says."""
