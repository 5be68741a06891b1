"""Draft trees made of whole drafts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.runtime.core.tree import DraftTree, TreeBuilder


def merge_chains(chains: Sequence[Sequence[int]]) -> DraftTree:
    """Return the trie of several drafts behind one root, the first draft's nodes first."""
    tree = TreeBuilder()
    candidates: list[list[int]] = [[]]
    for chain in chains:
        node = 0
        for token in chain:
            child = tree.add(node, token)
            if child == len(candidates):
                candidates.append([])
            candidates[node].append(child)
            node = child
    return DraftTree(
        tokens=tuple(tree.tokens),
        parents=tuple(tree.parents),
        candidates=tuple(map(tuple, candidates)),
    )


def tokens_of(tree: DraftTree, path: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of nodes other than the root."""
    return tuple(tree.tokens[node - 1] for node in path)
