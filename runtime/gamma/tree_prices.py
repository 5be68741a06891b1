"""What the tokens of a tree cost beside the rows of a step, and how many of them can pay.

From the measured cost of a pass over trees of as many rows (``runtime.gamma.costs``). An engine that packs rows runs
trees in a pass of their own, beside that of the other rows. With any other engine a pass is as wide as its widest row,
so that rows without drafts pay for the others' trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from outrider.engines.base import EngineLimits
from outrider.runtime.gamma.costs import CostTable


class TreePrices:
    """Prices by number of rows.

    Args:
        table: measured costs.
        max_nodes: tokens of a tree at most, as configured.
        limits: of the target.
        packs_rows: of the target.
    """

    def __init__(
        self, table: CostTable, max_nodes: int, limits: EngineLimits, *, packs_rows: bool
    ) -> None:
        num_nodes = max(1, min(max_nodes, limits.max_tree_nodes - 1))

        @cache
        def price(num_rows: int, num_drafting: int) -> float:
            num_wide = num_drafting if packs_rows else num_rows
            return node_cost(table, num_nodes, num_rows, num_wide) * num_rows / num_drafting

        self._price = price

    def of_step(self, gammas: Sequence[int | None]) -> float:
        """Return what each token of a tree adds to a step in which rows of a gamma above 0 may carry trees.

        In plain steps of as many rows.
        """
        return self._price(len(gammas), sum(1 for gamma in gammas if gamma))


def node_cost(
    table: CostTable, num_nodes: int, num_rows: int = 1, num_wide: int | None = None
) -> float:
    """Return what each token of trees of ``num_nodes`` adds to a plain step, in plain steps.

    A node is worth its place where it is kept more often than that: then it yields more tokens per second than plain
    decoding of as many rows.

    Args:
        table: measured costs.
        num_nodes: tokens of a tree without its root.
        num_rows: of the step.
        num_wide: rows that are as wide as a tree, in a pass of their own; None for all.
    """
    num_wide = num_rows if num_wide is None else num_wide
    capacity, num_narrow = table.capacities[0], num_rows - num_wide
    plain_s = table.target.extend_s(num_rows, 1, capacity)
    tree_s = (table.trees or table.target).extend_s(num_wide, 1 + num_nodes, capacity)
    if num_narrow:
        tree_s += table.target.extend_s(num_narrow, 1, capacity)
    return max(0.0, tree_s - plain_s) / num_nodes / (plain_s + table.host.step_s)


def affordable_nodes(max_nodes: int, gamma: int, node_cost: float) -> int:
    """Return the tokens that a tree of depth ``gamma`` may have and still pay if a whole path of it is kept.

    0 where a chain is as good; ``node_cost`` is in plain steps.
    """
    if max_nodes * node_cost > gamma:
        max_nodes = int(gamma / node_cost)
    return max_nodes if max_nodes > gamma else 0
