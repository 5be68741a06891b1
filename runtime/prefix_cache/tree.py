"""Texts whose caches are kept, by their tokens: a radix tree per scope, within a budget of bytes.

Texts of one scope that begin alike share what they share. A node has the tokens behind its parent's and what an engine
cached of them; where two texts part, a node ends:

    root -- "You are ..." -- "Question one ..." -- "And then?"
                         `- "Question two ..."

Tokens are compared themselves, not by hashes: no text is taken for another one. What is cached is an array with tokens
on the axis before the last, copied when a node is parted, so that what is evicted is free memory.

Invariants:

* T1  In the order of use, which is what is evicted first, every node stands before its parent: the first is a leaf.
* T2  ``num_bytes`` is never above the budget. Only while a node is parted, its copy stands beside it, and a state until
  there is room for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from outrider.engines.base import FloatArray, IntArray

TOKEN_BYTES = 8
"""Of a token's id, beside what is cached of it."""


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens [n] int64 behind those of ``parent``, None for a root, and what is cached of them [..., n, D]."""

    tokens: IntArray
    values: FloatArray
    parent: _Node | None
    scope: Hashable
    # By their first token.
    children: dict[int, _Node] = field(default_factory=dict)
    # Of recurrent layers, behind the last token.
    state: FloatArray | None = None

    @property
    def num_bytes(self) -> int:
        of_state = 0 if self.state is None else self.state.nbytes
        return self.values.nbytes + self.tokens.nbytes + of_state


class PrefixTree:
    """The cached texts of all scopes; not thread-safe.

    Args:
        max_bytes: of what is cached and of the tokens' ids.

    Attributes:
        num_bytes: in use.
        num_evicted: pieces of texts that others have replaced.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = self.num_evicted = 0
        self._max_bytes = max_bytes
        self._roots: dict[Hashable, _Node] = {}
        # Unused for longest first (T1); without roots.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        # Those with a state, the one that was kept first first.
        self._stated: dict[_Node, None] = {}

    def find(self, scope: Hashable, tokens: IntArray) -> list[FloatArray]:
        """Return what is cached of the longest beginning of a text that is, piece by piece; empty for none.

        Args:
            scope: texts of others are not looked at.
            tokens: [n] int64.

        Returns:
            Arrays [..., m, D] float32, valid until the next ``insert``; not to be written to.
        """
        path = self._walk(scope, tokens)
        return [node.values[..., :count, :] for node, count in path]

    def find_state(
        self, scope: Hashable, tokens: IntArray
    ) -> tuple[list[FloatArray], FloatArray | None, int]:
        """Return what is cached of the longest beginning of a text whose state is, and how much of it is without.

        Args:
            scope: texts of others are not looked at.
            tokens: [n] int64.

        Returns:
            Arrays as ``find`` returns them; the state behind them, [m] float32, None where there is none; tokens of the
            longest beginning that is cached.
        """
        path = self._walk(scope, tokens)
        num_cached = sum(count for _, count in path)
        while path and (path[-1][0].state is None or path[-1][1] < len(path[-1][0].tokens)):
            path.pop()
        state = path[-1][0].state if path else None
        return [node.values for node, _ in path], state, num_cached

    def insert(
        self,
        scope: Hashable,
        tokens: IntArray,
        read: Callable[[int, int], FloatArray],
        token_bytes: int,
        read_state: Callable[[], FloatArray] | None = None,
    ) -> None:
        """Keep a text, or as much of its beginning as there is room for; what was unused for longest goes.

        Args:
            scope: of the text.
            tokens: [n] int64, copied.
            read: returns what is cached of the tokens from a first one up to an end: [..., end - start, D] float32,
                the tree's own from then on. Asked at most once, for what is not kept yet; where it raises, nothing
                more is kept.
            token_bytes: of one token, as ``read`` returns it.
            read_state: returns the state of recurrent layers behind the text, which is then kept whole or not at all;
                the tree's own from then on. Not asked where it is kept already.
        """
        path = self._walk(scope, tokens)
        start = sum(count for _, count in path)
        if start == len(tokens) and (read_state is None or not path or _has_state(*path[-1])):
            return
        state = None if read_state is None else read_state()
        state_bytes = 0 if state is None else state.nbytes
        parent = self._parted(*path[-1]) if path else None
        size = token_bytes + TOKEN_BYTES
        # Parted first, so that of what the text shares with others no more than that is in its way.
        room = self._max_bytes - _bytes_above(parent) - state_bytes
        if start == len(tokens):
            assert parent is not None
            assert state is not None
            if room >= 0:
                self._evict(self._max_bytes - state_bytes, parent)
                self._give(parent, state)
            return
        end = min(len(tokens), start + room // size)
        if end <= start or (state is not None and end < len(tokens)):
            return
        self._evict(self._max_bytes - (end - start) * size - state_bytes, parent)
        values = read(start, end)
        if parent is None:
            parent = self._roots.setdefault(scope, _Node(*_NOTHING, None, scope))
        node = _Node(tokens[start:end].copy(), values, parent, scope)
        parent.children[int(tokens[start])] = node
        self.num_bytes += node.num_bytes
        self._use(node)
        if state is not None:
            self._give(node, state)

    def _give(self, node: _Node, state: FloatArray) -> None:
        node.state = state
        self._stated[node] = None
        self.num_bytes += state.nbytes

    def _walk(self, scope: Hashable, tokens: IntArray) -> list[tuple[_Node, int]]:
        """Return the nodes along a text, now used, and how many of its tokens are theirs: all but of the last one."""
        path: list[tuple[_Node, int]] = []
        at, node = 0, self._roots.get(scope)
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is not None:
                count = _num_equal(node.tokens, tokens[at:])
                path.append((node, count))
                at += count
                node = node if count == len(node.tokens) else None
        if path:
            self._use(path[-1][0])
        return path

    def _use(self, node: _Node) -> None:
        """Note that a text is used: its end first, so that T1 holds."""
        while node.parent is not None:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent

    def _evict(self, num_bytes: int, going_on: _Node | None) -> None:
        """Forget states that texts go on behind, then leaves, until no more than so many bytes are in use.

        ``going_on`` is the node that a text is about to go on behind.
        """
        for node in list(self._stated) if self.num_bytes > num_bytes else ():
            is_inner = node.children or node is going_on
            if self.num_bytes > num_bytes and node.state is not None and is_inner:
                self.num_bytes -= node.state.nbytes
                node.state = None
                del self._stated[node]
        while self.num_bytes > num_bytes:
            node, _ = self._nodes.popitem(last=False)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            self._stated.pop(node, None)
            if parent.parent is None and not parent.children:
                del self._roots[node.scope]
            self.num_bytes -= node.num_bytes
            self.num_evicted += 1

    def _parted(self, node: _Node, count: int) -> _Node:
        """Return the node that ends behind the first ``count`` tokens of one: itself, or one that is put above it."""
        if count == len(node.tokens):
            return node
        above, first = node.parent, int(node.tokens[0])
        assert above is not None
        tokens, values = node.tokens, node.values
        head = _Node(tokens[:count].copy(), values[..., :count, :].copy(), above, node.scope)
        node.tokens, node.values = tokens[count:].copy(), values[..., count:, :].copy()
        node.parent, head.children[int(node.tokens[0])] = head, node
        above.children[first] = head
        self._use(head)
        return head


_NOTHING = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32)


def _has_state(node: _Node, count: int) -> bool:
    """Return whether the state behind the first ``count`` tokens of a node is kept."""
    return node.state is not None and count == len(node.tokens)


def _bytes_above(node: _Node | None) -> int:
    """Return the bytes of a text up to the end of a node, without states, which may go; 0 for None."""
    num_bytes = 0
    while node is not None:
        num_bytes += node.values.nbytes + node.tokens.nbytes
        node = node.parent
    return num_bytes


def _num_equal(first: IntArray, second: IntArray) -> int:
    """Count the leading tokens that two texts share."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax())
    return at if differs[at] else length
