"""Trees of drafters that know several continuations: grown best first, within a budget.

A node is worth its place where the chance that the target keeps it, as the drafter estimates it,
exceeds what verifying one more token costs in plain steps; estimates steer speed alone, since nodes
are judged as point masses.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.tree import preorder
from outrider.runtime.drafters.base import Draft, DrafterCapabilities, DraftRow, least_prob
from outrider.runtime.drafters.chain import ChainDrafter

S = TypeVar("S")
P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How large a tree may grow.

    Attributes:
        max_depth: tokens of a path.
        max_nodes: tokens of the tree.
        min_prob: least estimated chance of a node being kept; above 0.
    """

    max_depth: int
    max_nodes: int
    min_prob: float

    @classmethod
    def of_row(cls, row: DraftRow, config: DraftingConfig) -> Self | None:
        """Return the budget of a row's tree, by the server's settings; None where the row takes a chain."""
        max_nodes = min(row.max_nodes, config.tree_nodes)
        if max_nodes == 0:
            return None
        prob = config.min_node_prob if row.node_cost is None else least_prob(row.node_cost)
        return cls(max_depth=row.gamma, max_nodes=max_nodes, min_prob=prob)


Followers = Callable[[P], Sequence[tuple[int, float, P]]]
"""From a place in a drafter's knowledge to each next token, its estimated probability and the place behind it,
likeliest first."""


def grow(
    start: P, followers: Followers[P], budget: Budget, ends: Collection[int] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return tokens and parents of the likeliest nodes, the path of first children first.

    Nodes are taken by (probability descending, depth ascending, order of discovery), which keeps a
    parent before its children also where a child is certain. Nothing follows an end token.

    Args:
        start: place of the last committed token.
        followers: what may follow a place.
        budget: where to stop.
        ends: tokens that nothing follows.
    """
    tokens: list[int] = []
    parents: list[int] = []
    found: list[tuple[float, int, int, int, int, P]] = []
    serial = 0

    def open_node(node: int, prob: float, depth: int, place: P) -> None:
        nonlocal serial
        for token, share, behind in followers(place):
            if prob * share < budget.min_prob:
                break
            serial += 1
            heapq.heappush(found, (-prob * share, depth + 1, serial, node, token, behind))

    open_node(0, 1.0, 0, start)
    while found and len(tokens) < budget.max_nodes:
        negative, depth, _, parent, token, place = heapq.heappop(found)
        tokens.append(token)
        parents.append(parent)
        if depth < budget.max_depth and token not in ends:
            open_node(len(tokens), -negative, depth, place)
    return preorder(tokens, parents)


def as_draft(
    tokens: tuple[int, ...], parents: tuple[int, ...], num_computed: int | None = None
) -> Draft:
    """Return a tree of point masses as a draft; one without branches is a chain, and verified as one."""
    is_chain = parents == tuple(range(len(parents)))
    return Draft(tokens=tokens, parents=None if is_chain else parents, num_computed=num_computed)


class BranchingDrafter(ChainDrafter[S]):
    """Base of drafters that propose trees where the row may carry one, and chains elsewhere."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        is_guesser=True, proposes_trees=True
    )

    @abstractmethod
    def branch(
        self, state: S, budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and parents of a tree behind the committed tokens."""

    def draft(self, row: DraftRow) -> Draft:
        """Return a tree, or a chain where the row takes no tree."""
        budget = Budget.of_row(row, self._config)
        if budget is None:
            return self.chain(row)
        return as_draft(*self.branch(self.state_of(row), budget, row.sampling.params.end_token_ids))
