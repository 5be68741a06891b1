"""The guess that one pass of a draft model verifies: a trie of phrases, and a window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outrider.engines.base import Span
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.phrases.window import LookaheadWindow


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess that one pass verifies behind the last token it feeds.

    Attributes:
        num_phrase_nodes: leading nodes that are phrases; the others are the window's.
        window: None where none is fed.
        ends: last node of each of its columns.
    """

    tree: TreeBuilder
    num_phrase_nodes: int
    window: LookaheadWindow | None = None
    ends: tuple[int, ...] = ()

    def followers(self, node: int) -> list[int]:
        """Return the tokens of phrases behind a node."""
        tree = self.tree
        behind = range(node, self.num_phrase_nodes)
        return [tree.tokens[index] for index in behind if tree.parents[index] == node]

    def span(self, slot: int, start: int, fed: tuple[int, ...], num_settled: int) -> Span:
        """Return the tokens to feed: the missing ones as a chain, and this behind the last of them."""
        root, behind = len(fed) - 1, self.tree.parents
        is_chain = behind == list(range(len(behind)))
        return Span(
            slot=slot,
            start=start,
            tokens=(*fed, *self.tree.tokens),
            num_logits=len(behind) + 1,
            parents=None if is_chain else (*range(root), *(root + parent for parent in behind)),
            num_settled=num_settled,
        )


def cut(chain: tuple[int, ...], num_known: int, ends: Collection[int]) -> tuple[int, ...]:
    """Return a chain up to the first token that is an end or at or beyond ``num_known``."""
    for index, token in enumerate(chain):
        if not 0 <= token < num_known or token in ends:
            return chain[:index]
    return chain
