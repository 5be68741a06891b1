"""Drafts that are trees, and which path of one the target keeps: the definition, in float64.

A chain is the simple tree. Pure functions of probabilities and given random numbers; no noise is drawn, no engine,
request or device is known. The judges in ``engines`` are tested against these functions.

Symbols: p is the target's row at a node, q_k the law of a node's k-th candidate given the candidates before it and
everything above, u a uniform.

Why it is exact. At one node each test is a round of ``verification`` against what is left of the target's row: a
candidate x is kept with mass min(q_k, cur)(x), and cur becomes norm((cur - q_k)+), which is exactly the law that the
mass not kept still owes. So whichever way the node is left, by a candidate or by the row that remains, the token has
law p; and the next node is judged only when it was reached, which was decided before it is looked at. For point masses
this is one draw from p per node: a candidate that equals the draw is kept. Two things would break it, and both have
been published: drawing again where the draw matched nothing, and drawing once per path for a node that paths share.

Source: Miao et al. 2023 (arXiv:2305.09781, SpecInfer) for candidates drawn independently; Jeon et al. 2024
(arXiv:2402.14160, recursive rejection sampling) for candidates drawn without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.base import IntArray
from engines.trees import BoolArray, check_parents, tree_layout
from runtime.core.verification import SMALLEST_RESIDUAL, Probs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Candidates for the tokens after the last committed one, which is the root, node 0.

    Node i + 1 holds ``tokens[i]`` and stands behind node ``parents[i]``, one of 0..i: the numbering of ``Span``, whose
    tokens are the root's and then these.

    Attributes:
        tokens: [N] ids.
        parents: [N] nodes.
        offers: per node 0..N its children in the order they were drafted. A child drafted twice is named twice: the
            node-wise verifier must test it twice, though the engine computes it once.

    Raises:
        EngineError: a parent does not stand before its child.
        ValueError: ``offers`` are not the children of their nodes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    offers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_parents(self.parents)
        if len(self.tokens) != len(self.parents) or len(self.offers) != len(self.tokens) + 1:
            raise ValueError("a tree of N tokens has N parents and N + 1 lists of offers")
        for node, offered in enumerate(self.offers):
            children = {child for child, parent in enumerate(self.parents, 1) if parent == node}
            if set(offered) != children:
                raise ValueError(f"the offers of node {node} must be its children")

    @property
    def depths(self) -> IntArray:
        """[N + 1] int64, the root's is 0."""
        return tree_layout(self.parents).depths

    @property
    def ancestors(self) -> BoolArray:
        """[N + 1, N + 1] bool: (i, j) where node j is i or stands above it."""
        return tree_layout(self.parents).ancestors

    def positions(self, num_committed: int) -> IntArray:
        """[N + 1] int64 places in the sequence; the root is the last of ``num_committed`` tokens."""
        return num_committed - 1 + self.depths

    def tokens_of(self, path: Sequence[int]) -> tuple[int, ...]:
        """Ids of nodes other than the root."""
        return tuple(self.tokens[node - 1] for node in path)


class TreeBuilder:
    """A tree that grows node by node; equal children of one node are one.

    Attributes:
        tokens: of nodes 1, 2, ...
        parents: likewise; node 0 is the root.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The child of ``parent`` that holds ``token``, made where there is none."""
        child = self._children.get((parent, token))
        if child is None:
            self.tokens.append(token)
            self.parents.append(parent)
            child = self._children[parent, token] = len(self.tokens)
        return child

    def add_chain(self, chain: Sequence[int]) -> int:
        """A whole path behind the root; its last node."""
        node = 0
        for token in chain:
            node = self.add(node, token)
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The child of ``parent`` that holds ``token``; None where there is none."""
        return self._children.get((parent, token))


def merge_chains(chains: Sequence[Sequence[int]], *, max_nodes: int | None = None) -> DraftTree:
    """The trie of several drafts behind one root: equal beginnings are computed once.

    The first chain's nodes come first, so that of all paths the first keeps the bits of a chain (``engines.base`` I3)
    and needs no moving.

    Args:
        chains: ids of each draft, likeliest first; for sampled chains the order they were drawn in.
        max_nodes: N at most; chains are cut where it is reached, first come first served.
    """
    tree = TreeBuilder()
    offers: list[list[int]] = [[]]
    for chain in chains:
        node = 0
        for token in chain:
            is_full = max_nodes is not None and len(tree.tokens) >= max_nodes
            if is_full and tree.child(node, token) is None:
                break
            child = tree.add(node, token)
            if child == len(offers):
                offers.append([])
            offers[node].append(child)
            node = child
    return DraftTree(
        tokens=tuple(tree.tokens), parents=tuple(tree.parents), offers=tuple(map(tuple, offers))
    )


def match_walk(tree: DraftTree, target_tokens: IntArray) -> tuple[tuple[int, ...], int]:
    """Path of nodes that equal the target's own draws, and the draw after them, which is emitted.

    Exact for any tree: the emitted tokens are the target's draws whatever was drafted.

    Args:
        tree: of N nodes, however they were found.
        target_tokens: [N + 1] int64, the one draw (or argmax) of the target after each node. Only those on the path
            are looked at, so at most one draw is used per position.

    Returns:
        Kept nodes from the root's child down, and the next token.
    """
    path: list[int] = []
    node = 0
    while True:
        drawn = int(target_tokens[node])
        agreeing = [child for child in tree.offers[node] if tree.tokens[child - 1] == drawn]
        if not agreeing:
            return tuple(path), drawn
        node = agreeing[0]
        path.append(node)


def judge_offers(
    tokens: IntArray,
    offer_probs: Probs,
    target_row: Probs,
    uniforms: Probs,
    *,
    lenience: float = 1.0,
) -> tuple[int | None, Probs]:
    """Which of a node's candidates is kept, or the law of the token that is drawn instead.

    Args:
        tokens: [K] int64, in the order they were drafted.
        offer_probs: [K, V] float64, row k is the law of candidate k given those before it; rows sum to 1.
        target_row: [V] float64, sums to 1.
        uniforms: [K] float64 in [0, 1), one coin per candidate.
        lenience: l in (0, 1]; at any l no token is emitted with more than p / l: candidates are tested against the
            same rows as at 1, and each is reached at most as often.

    Returns:
        Index of the first candidate kept, or None, and the law [V] that remains: where none was kept, of the token to
        draw. Without candidates that is the target's own row.
    """
    current = target_row
    for index, token in enumerate(tokens):
        proposed = offer_probs[index]
        if uniforms[index] * lenience * proposed[token] < current[token]:
            return index, current
        residual: Probs = np.maximum(current - proposed, 0.0)
        mass = residual.sum()
        current = residual / mass if mass > SMALLEST_RESIDUAL else current
    return None, current


def node_wise_walk(
    tree: DraftTree,
    offer_probs: Sequence[Probs],
    target_probs: Probs,
    uniforms: Sequence[Probs],
    *,
    lenience: float = 1.0,
) -> tuple[tuple[int, ...], Probs]:
    """Path that the target keeps of a tree of sampled candidates, and the law of the token after it.

    Args:
        tree: of N nodes.
        offer_probs: per node [K, V] float64, the law of each of its K offers.
        target_probs: [N + 1, V] float64, rows sum to 1.
        uniforms: per node [K] float64 in [0, 1).
        lenience: l in (0, 1]; 1 is exact.
    """
    path: list[int] = []
    node = 0
    while True:
        offered = tree.offers[node]
        kept, remaining = judge_offers(
            np.array([tree.tokens[child - 1] for child in offered], dtype=np.int64),
            offer_probs[node],
            target_probs[node],
            uniforms[node],
            lenience=lenience,
        )
        if kept is None:
            return tuple(path), remaining
        node = offered[kept]
        path.append(node)


def without_replacement(draft_row: Probs, tokens: Sequence[int]) -> Probs:
    """[K, V] float64: the law of each token drawn from a row after the ones before it were taken out.

    Args:
        draft_row: [V] float64, sums to 1.
        tokens: [K] different ids of positive probability.
    """
    rows = np.zeros((len(tokens), len(draft_row)))
    left = draft_row.copy()
    for index, token in enumerate(tokens):
        rows[index] = left / left.sum()
        left[token] = 0.0
    return rows


def pruned(
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    max_depth: int,
    max_nodes: int,
    vocab_size: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of what may be verified of a proposed tree.

    Left out are ids outside the vocabulary, nodes too deep or beyond the budget, and all behind them.

    Raises:
        EngineError: a parent does not stand before its child.
        ValueError: tokens and parents differ in number.
    """
    if len(tokens) != len(parents):
        raise ValueError("a tree of N tokens has N parents")
    check_parents(parents)
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    # Node before -> (node after, depth), for nodes that stay.
    places = {0: (0, 0)}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent not in places or not 0 <= token < vocab_size or len(kept_tokens) >= max_nodes:
            continue
        above, depth = places[parent]
        if depth < max_depth:
            kept_tokens.append(token)
            kept_parents.append(above)
            places[node] = (len(kept_tokens), depth + 1)
    return tuple(kept_tokens), tuple(kept_parents)


def preorder(
    tokens: Sequence[int], parents: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same tree numbered depth first, children in their order: the path of first children comes first.

    Raises:
        EngineError: a parent does not stand before its child.
        ValueError: tokens and parents differ in number.
    """
    if len(tokens) != len(parents):
        raise ValueError("a tree of N tokens has N parents")
    check_parents(parents)
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    order: list[int] = []
    stack = list(reversed(children[0]))
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    places = {0: 0} | {node: place for place, node in enumerate(order, start=1)}
    return (
        tuple(tokens[node - 1] for node in order),
        tuple(places[parents[node - 1]] for node in order),
    )


def leading_chain(tokens: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """The path of a tree that takes the first child everywhere: its drafter's best guess.

    Raises:
        EngineError: a parent does not stand before its child.
        ValueError: tokens and parents differ in number.
    """
    if len(tokens) != len(parents):
        raise ValueError("a tree of N tokens has N parents")
    check_parents(parents)
    chain: list[int] = []
    end = 0
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent == end:
            chain.append(token)
            end = node
    return tuple(chain)


def tried_chain(
    tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]
) -> tuple[int, ...]:
    """The kept path of a tree, and the first child that was tried and rejected behind it, if any.

    What a chain that met the same fate would have been: its accepted tokens over its trials estimate the chance that
    some child is kept.
    """
    end = path[-1] if path else 0
    tried = next((child for child, parent in enumerate(parents, start=1) if parent == end), None)
    nodes = path if tried is None else (*path, tried)
    return tuple(tokens[node - 1] for node in nodes)
