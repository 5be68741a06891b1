"""Draft trees: build, cut and read them. A chain is the simple tree.

``runtime.oracle.tree_walks`` decides which path of a tree the target keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.trees import check_parents


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Candidates for the tokens after the last committed one, which is the root, node 0.

    Node i + 1 holds ``tokens[i]`` and stands behind node ``parents[i]``, one of 0..i: the numbering of ``Span``, whose
    tokens are the root's and then these.

    Attributes:
        tokens: [N] ids.
        parents: [N] nodes.
        candidates: per node 0..N its children in the order they were drafted. A child drafted twice is named twice: the
            node-wise verifier must test it twice, though the engine computes it once.

    Raises:
        EngineError: a parent does not stand before its child.
        ValueError: ``candidates`` are not the children of their nodes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_parents(self.parents)
        if len(self.tokens) != len(self.parents) or len(self.candidates) != len(self.tokens) + 1:
            raise ValueError("a tree of N tokens has N parents and N + 1 lists of offers")
        for node, offered in enumerate(self.candidates):
            children = {child for child, parent in enumerate(self.parents, 1) if parent == node}
            if set(offered) != children:
                raise ValueError(f"the offers of node {node} must be its children")

    @property
    def has_distinct_siblings(self) -> bool:
        """Return whether no node was offered a token twice."""
        offers = ([self.tokens[child - 1] for child in offered] for offered in self.candidates)
        return all(len(set(offered)) == len(offered) for offered in offers)


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
        """Return the child of ``parent`` that holds ``token``; make it where there is none."""
        child = self._children.get((parent, token))
        if child is None:
            self.tokens.append(token)
            self.parents.append(parent)
            child = self._children[parent, token] = len(self.tokens)
        return child

    def add_chain(self, chain: Sequence[int], *, max_nodes: int | None = None) -> int:
        """Add a path behind the root, cut where the tree has ``max_nodes`` tokens; return its last node."""
        children, node, num_nodes = self._children, 0, len(self.tokens)
        for token in chain:
            child = children.get((node, token))
            if child is None:
                if max_nodes is not None and num_nodes >= max_nodes:
                    break
                self.tokens.append(token)
                self.parents.append(node)
                num_nodes += 1
                child = children[node, token] = num_nodes
            node = child
        return node

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of ``parent`` that holds ``token``; None where there is none."""
        return self._children.get((parent, token))


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
    _check_tree(tokens, parents)
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
    """Number a tree depth first, children in their order; the path of first children comes first."""
    _check_tree(tokens, parents)
    order, places = preorder_places(parents)
    return (
        tuple(tokens[node - 1] for node in order),
        tuple(places[parents[node - 1]] for node in order),
    )


def preordered(tree: DraftTree) -> DraftTree:
    """Number a tree depth first, its candidates included."""
    tokens, parents = preorder(tree.tokens, tree.parents)
    order, places = preorder_places(tree.parents)
    candidates = tuple(
        tuple(places[child] for child in tree.candidates[node]) for node in (0, *order)
    )
    return DraftTree(tokens=tokens, parents=parents, candidates=candidates)


def preorder_places(parents: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return all nodes but the root, depth first, and every node's place in that order; the root's is 0."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    order: list[int] = []
    stack = list(reversed(children[0]))
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    return order, {0: 0} | {node: place for place, node in enumerate(order, start=1)}


def leading_chain(tokens: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Return the path that takes the first child everywhere: the drafter's best guess. Raises as ``pruned``."""
    _check_tree(tokens, parents)
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
    """Return the tokens of a tree's kept path, and of the first child that was rejected behind it, if any.

    They are a chain's with the same outcome: its accepted tokens over its trials estimate the chance that some child is
    kept.
    """
    end = path[-1] if path else 0
    tried = next((child for child, parent in enumerate(parents, start=1) if parent == end), None)
    nodes = path if tried is None else (*path, tried)
    return tuple(tokens[node - 1] for node in nodes)


def num_leading(path: Sequence[int]) -> int:
    """Count the nodes of a path, from the root's child down, that belong to the tree's leading chain."""
    return next((i for i, node in enumerate(path) if node != i + 1), len(path))


def _check_tree(tokens: Sequence[int], parents: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise ValueError("a tree of N tokens has N parents")
    check_parents(parents)
