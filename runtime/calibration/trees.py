"""Measures passes of the target over trees.

Such a pass runs another graph than one over chains and is wider than any of them, so that chains do not tell its cost.
"""

from __future__ import annotations

import numpy as np
from outrider.engines.base import Engine
from outrider.engines.kv_cache import MIN_SPAN
from outrider.runtime.calibration.fitting import fit_model
from outrider.runtime.calibration.timing import Clock, extend_call, timed
from outrider.runtime.gamma.costs import ModelCosts

# Tokens: the least tree that branches, then 8, 16 and 32 drafts with their root.
SPANS = (3, 9, 17, 33)
MOST_ROWS = 8  # rows of the second point of the line through rows; more cost in proportion, and would take long
ROUNDS = 5  # of each call: too few for a quartile, so that the least disturbed counts


def measure_trees(
    engine: Engine, plain: ModelCosts, total_s: float, clock: Clock
) -> ModelCosts | None:
    """Return the costs of passes over trees; None where the engine takes none.

    They are timed in turns with plain passes and scaled by the cost of those in ``plain``: a machine that has become
    slower since makes trees no dearer beside chains. After ``total_s`` no second number of rows is begun.
    """
    widest = min(engine.limits.max_tree_nodes, engine.limits.max_extend, engine.limits.max_context)
    if widest < SPANS[0]:
        return None
    spans = (*(n for n in SPANS if n < widest), widest)
    until = clock() + total_s
    grid: dict[int, list[float]] = {}
    for rows in (plain.batches[0], max(n for n in plain.batches if n <= MOST_ROWS)):
        if rows in grid or (grid and clock() > until):
            break
        # The first plain pass follows the widest tree, and takes longer for it: the second counts.
        calls = [extend_call(engine, rows, MIN_SPAN)] * 2
        calls += [extend_call(engine, rows, tokens, is_tree=True) for tokens in spans]
        timed(calls, clock)  # allocates and plans
        _, plain_s, *trees_s = np.min([timed(calls, clock) for _ in range(ROUNDS)], axis=0).tolist()
        scale = plain.extend_s(rows, MIN_SPAN, plain.capacity) / plain_s
        grid[rows] = [scale * seconds for seconds in trees_s]
    return fit_model(np.array(list(grid.values())), tuple(grid), spans, plain.capacity)
