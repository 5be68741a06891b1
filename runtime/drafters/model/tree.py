"""A tree of candidates sampled from the draft model: several tries per position, judged node by node.

Grown level by level: one pass of the draft model over the tree so far, then the sampler draws the children of its
newest nodes and keeps the probabilities it drew them from. The number of children per level is decided before
anything is drawn there (``branching``), as far as the budget of nodes reaches, so that a candidate is judged by the
probabilities it was drawn from. Siblings are one that is drawn and the likeliest others:
``engines.sampling.candidates``.

Greedy and seed_stable rows, rows that are verified as blocks, and rows that take no trees get the draft model's chain.

Source: Miao et al. 2023 (arXiv:2305.09781, SpecInfer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from outrider.engines.base import FloatArray, Span
from outrider.engines.sampling.base import CandidateNode, CandidateSampler, IntArray32
from outrider.engines.trees import chain_length
from outrider.runtime.core.tree import DraftTree, preorder, preorder_places, preordered
from outrider.runtime.drafters.base import Draft, DrafterCapabilities, DrafterParts, DraftRow, Need
from outrider.runtime.drafters.model.model import (
    ModelDrafter,
    chain_draft,
    is_sampled,
    with_idle_slots,
)
from outrider.runtime.grammar.base import Constraint


class Growth:
    """One row's tree while it grows.

    Nodes are numbered as they were drawn, the root is 0.

    Attributes:
        newest: nodes whose children may be drawn next, and the tokens that lead to each.
    """

    def __init__(self, *, max_nodes: int, depth: int) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._candidates: list[list[int]] = [[]]
        self._max_nodes = max_nodes
        self._depth_left = depth
        self.newest: list[tuple[int, tuple[int, ...]]] = [(0, ())]

    @property
    def num_left(self) -> int:
        """Return the number of nodes that the tree may still be given."""
        return self._max_nodes - len(self._tokens)

    @property
    def is_open(self) -> bool:
        """Return whether another level may be drawn."""
        return self._depth_left > 0 and self.num_left > 0 and bool(self.newest)

    def columns(self) -> list[int]:
        """Return the places in ``span`` of the newest nodes' tokens."""
        _, places = preorder_places(self._parents)
        return [places[node] for node, _ in self.newest]

    def span(self, slot: int, start: int, root: int) -> Span:
        """Return all tokens so far behind their root, the path of first children first."""
        tokens, parents = preorder(self._tokens, self._parents)
        return Span(
            slot=slot,
            start=start,
            tokens=(root, *tokens),
            num_logits=len(tokens) + 1,
            parents=parents,
        )

    def add_level(self, drawn: Sequence[tuple[int, ...]], ends: Sequence[int]) -> None:
        """Give the newest nodes their children; nothing follows an end token.

        Args:
            drawn: of the first of the newest nodes, their different candidates in order.
            ends: tokens that nothing follows.
        """
        following: list[tuple[int, tuple[int, ...]]] = []
        for (node, path), candidates in zip(self.newest, drawn, strict=False):
            for token in candidates:
                self._tokens.append(token)
                self._parents.append(node)
                self._candidates.append([])
                self._candidates[node].append(len(self._tokens))
                if token not in ends:
                    following.append((len(self._tokens), (*path, token)))
        self.newest = following
        self._depth_left -= 1

    def tree(self) -> DraftTree:
        """Return the tree, the path of first children first."""
        return preordered(
            DraftTree(
                tokens=tuple(self._tokens),
                parents=tuple(self._parents),
                candidates=tuple(map(tuple, self._candidates)),
            )
        )


class TreeDrafter(ModelDrafter):
    """Proposes a tree of candidates drawn from the draft model."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        needs=frozenset({Need.DRAFT_MODEL, Need.DRAFT_TREES}), proposes_trees=True, is_sampled=True
    )

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        assert isinstance(parts.sampler, CandidateSampler), "offered only where one keeps its probs"
        self._sampler_of_trees = parts.sampler
        self._branching = parts.config.branching
        limits = self._limits
        self._max_nodes = min(
            parts.config.tree_nodes, limits.max_tree_nodes - 1, limits.max_extend - 1
        )
        # A path through side branches leaves the draft model all of its tokens to read.
        self.max_shared_missing = parts.max_gamma + 1

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Propose a tree, or a chain, per chosen slot that is, or can be brought, up to date."""
        ready = self.prepare(live, chosen)
        computed = list(ready.computed)
        growths = {
            slot: Growth(max_nodes=min(live[slot].max_nodes, self._max_nodes), depth=gamma)
            for slot, gamma in ready.gammas.items()
            if self._takes_tree(live[slot], gamma)
        }
        chains = {slot: gamma for slot, gamma in ready.gammas.items() if slot not in growths}
        tokens = self._draft_in_lockstep(live, chains, computed)
        self._grow(live, growths, computed)
        return [
            self._as_draft(growths[slot].tree(), computed[slot])
            if slot in growths
            else chain_draft(live[slot], tokens.get(slot, ()), computed[slot])
            for slot in chosen
        ]

    def _takes_tree(self, row: DraftRow, gamma: int) -> bool:
        """Return whether a tree would be judged by its probabilities, and branches at all."""
        is_ratio_tested = is_sampled(row) and not row.sampling.verifies_block
        return is_ratio_tested and row.max_nodes > 0 and max(self._counts(row)[:gamma]) > 1

    def _counts(self, row: DraftRow) -> tuple[int, ...]:
        return row.params.branching or self._branching

    def _as_draft(self, tree: DraftTree, num_computed: int) -> Draft:
        return Draft(
            tokens=tree.tokens,
            is_sampled=True,
            num_computed=num_computed,
            parents=tree.parents,
            candidates=tree.candidates,
        )

    def _grow(
        self, live: Sequence[DraftRow], growths: dict[int, Growth], computed: list[int]
    ) -> None:
        """Draw level after level for all rows in lockstep."""
        spans = {
            slot: Span(
                slot=slot,
                start=computed[slot],
                tokens=tuple(live[slot].sampling.history[computed[slot] :].tolist()),
                num_logits=1,
            )
            for slot in growths
        }
        depth = 0
        while spans:
            logits = self._engine.extend(with_idle_slots(spans, computed))
            for slot, span in spans.items():
                is_tree = span.parents is not None
                length = chain_length(span.parents or ()) if is_tree else len(span.tokens)
                computed[slot] = span.start + length
            self._draw_level(live, {slot: growths[slot] for slot in spans}, depth, logits)
            depth += 1
            spans = {
                slot: growths[slot].span(
                    slot, len(live[slot].sampling.history) - 1, int(live[slot].sampling.history[-1])
                )
                for slot in spans
                if growths[slot].is_open
            }

    def _draw_level(
        self, live: Sequence[DraftRow], growths: dict[int, Growth], depth: int, logits: FloatArray
    ) -> None:
        for slot, growth in growths.items():
            row, counts = live[slot], self._counts(live[slot])
            count = counts[depth] if depth < len(counts) else 1
            columns = growth.columns()
            sampling = replace(
                row.sampling,
                masks=None
                if row.constraint is None
                else masks_of_level(row.constraint, growth.newest, columns),
            )
            drawn: list[tuple[int, ...]] = []
            num_left = growth.num_left
            for (node, path), column in zip(growth.newest, columns, strict=True):
                if num_left < 1:
                    break
                point = CandidateNode(
                    row=replace(sampling, draft_tokens=path),
                    column=column,
                    node=node,
                    count=min(count, num_left),
                )
                drawn += self._sampler_of_trees.propose_children(
                    logits, [point], vocab_size=self._target_vocab_size
                )
                num_left -= len(drawn[-1])
            growth.add_level(drawn, row.sampling.params.end_token_ids)


def masks_of_level(
    constraint: Constraint, nodes: Sequence[tuple[int, tuple[int, ...]]], columns: Sequence[int]
) -> IntArray32:
    """Return masks of which those of these nodes lie in the rows of their columns; the others are not read.

    ``nodes`` are as in ``Growth.newest``.
    """
    rows = [constraint.follow(path).copy() for _, path in nodes]
    masks = np.empty((max(columns) + 1, len(rows[0])), dtype=np.int32)
    masks[list(columns)] = rows
    return masks
