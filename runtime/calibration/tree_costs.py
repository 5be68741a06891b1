"""Measures what passes of the target over trees cost: a part of ``runtime.calibration.calibrate``.

Such a pass runs another graph than one over chains, and is wider than any: neither is known from chains. It is timed in
turns with plain passes, so that whatever else the machine does meets both, and kept in their unit until their own time
is settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from outrider.engines.base import Engine, EngineLimits, Span
from outrider.engines.kv_cache import MIN_SPAN
from outrider.runtime.calibration.fitting import monotone, proportional
from outrider.runtime.gamma.costs import ModelCosts

TREE_SPANS = (3, 9, 17, 33)
# More rows cost in proportion.
MOST_ROWS, ROUNDS = 8, 5


@dataclass(frozen=True, slots=True)
class TreePasses:
    """What was timed.

    Attributes:
        spans: tokens of the trees.
        by_rows: per number of rows, a pass over each of these trees in plain passes of as many rows.
    """

    spans: tuple[int, ...]
    by_rows: Mapping[int, Sequence[float]]

    def costs(self, plain: ModelCosts) -> ModelCosts | None:
        """In seconds, given those of chains; None where nothing was timed."""
        if not self.by_rows:
            return None
        rows = tuple(self.by_rows)
        plain_s = [plain.extend_s(batch, MIN_SPAN, plain.capacity) for batch in rows]
        grid = np.array(list(self.by_rows.values())) * np.array(plain_s)[:, None]
        fitted = monotone(proportional(grid, rows, self.spans))
        seconds = tuple(tuple(row) for row in fitted.tolist())
        return replace(plain, batches=rows, tokens=self.spans, seconds=seconds)


def time_trees(
    engine: Engine,
    batches: Sequence[int],
    total_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> TreePasses:
    """Time passes of one row and of some, over trees up to the widest.

    Args:
        engine: the target, its slots free.
        batches: ascending rows that chains were timed with.
        total_s: after so many seconds no further number of rows is begun.
        clock: seconds.
    """
    spans = tree_spans(engine.limits)
    until = clock() + total_s
    found: dict[int, list[float]] = {}
    for batch in dict.fromkeys((batches[0], max(n for n in batches if n <= MOST_ROWS))):
        if not spans or (found and clock() > until):
            break
        calls = [_spans(batch, MIN_SPAN, is_tree=False)]
        calls += [_spans(batch, tokens, is_tree=True) for tokens in spans]
        rounds = [[_seconds(engine, call, clock) for call in calls] for _ in range(ROUNDS + 1)]
        # The first round allocates and plans; of the few others the least disturbed counts.
        plain_s, *trees_s = np.min(rounds[1:], axis=0).tolist()
        found[batch] = [one / plain_s for one in trees_s]
    return TreePasses(spans, found)


def tree_spans(limits: EngineLimits) -> tuple[int, ...]:
    """Tokens of the trees that are timed; none where the engine takes no trees."""
    widest = min(limits.max_tree_nodes, limits.max_extend, limits.max_context)
    if widest < TREE_SPANS[0]:
        return ()
    return (*(n for n in TREE_SPANS if n < widest), widest)


def _spans(batch: int, tokens: int, *, is_tree: bool) -> list[Span]:
    """As many rows, of one shape: what a pass costs depends on its width alone."""
    parents = (0,) * (tokens - 1) if is_tree else None
    return [
        Span(slot=slot, start=0, tokens=(0,) * tokens, num_logits=tokens, parents=parents)
        for slot in range(batch)
    ]


def _seconds(engine: Engine, spans: Sequence[Span], clock: Callable[[], float]) -> float:
    began = clock()
    engine.extend(spans)
    # A clock too coarse for the call must not make it free.
    return max(clock() - began, 1e-9)
