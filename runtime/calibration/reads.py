"""Measures reads of sources, and gives every slot one: of a model with an encoder no step is made without."""

from __future__ import annotations

from functools import partial

import numpy as np
from outrider.engines.base import Engine, Source
from outrider.engines.kv_cache import capacities
from outrider.runtime.calibration.fitting import fit_model
from outrider.runtime.calibration.timing import Clock, time_calls
from outrider.runtime.gamma.costs import ModelCosts

BATCHES, LENGTHS = (
    (1, 4),
    (16, 64, 256),
)  # rows, and tokens of each: between them times are nearly linear
ROUNDS = 2  # of each call, behind one that allocates: a long source takes as long as many steps
USUAL_LENGTH = 64  # tokens of the source that steps attend to while they are measured


def measure_reads(
    engine: Engine, total_s: float, clock: Clock, *, target: Engine | None = None
) -> ModelCosts | None:
    """Return the costs of reads, by rows and tokens of each source; None for a model without an encoder.

    After ``total_s`` no second number of rows is begun. No slot has a source afterwards. A draft is given its
    ``target``, which reads each source first, as it does when both serve: its encoder may answer for the draft's.
    """
    limits = engine.limits
    if limits.max_source == 0:
        return None
    shorter = [length for length in LENGTHS if length < limits.max_source]
    lengths = shorter if len(shorter) == len(LENGTHS) else [*shorter, limits.max_source]
    until = clock() + total_s
    grid: dict[int, list[float]] = {}
    for rows in sorted({min(rows, limits.max_batch) for rows in BATCHES}):
        if grid and clock() > until:
            break
        grid[rows] = []
        # One after the other: a short call after a long one takes longer.
        for sources in (_sources(rows, length) for length in lengths):
            if target is not None and target.limits.max_source >= len(sources[0].tokens):
                target.read(sources)
            seconds = time_calls([partial(engine.read, sources)], ROUNDS, clock)
            grid[rows].append(float(seconds[0]))
    # The longest source has made the cache larger than steps usually find it.
    for one in (engine, *([target] if target else [])):
        one.trim(())
    return fit_model(np.array(list(grid.values())), tuple(grid), lengths, capacities(limits)[0])


def read_everywhere(engine: Engine) -> None:
    """Give every slot a source of a usual length, where the engine reads any; their texts are empty afterwards."""
    limits = engine.limits
    if limits.max_source:
        engine.read(_sources(1, min(USUAL_LENGTH, limits.max_source)))
        if limits.max_batch > 1:
            engine.share_source(0, range(1, limits.max_batch))


def _sources(rows: int, length: int) -> list[Source]:
    return [Source(slot=slot, tokens=(0,) * length) for slot in range(rows)]
