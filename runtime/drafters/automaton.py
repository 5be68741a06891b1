"""A suffix automaton that counts: where any substring of the texts ended, and how often.

A state stands for all substrings that end at the same set of places; its count is the size of that
set. Appending a token is O(1) amortised plus one increment per suffix link, of which there are few
in natural text and at most ``automaton_loops.MAX_LINKS`` are followed. Texts of n tokens in all make
at most 2 n states and 3 n edges, which is what room is made for.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", and 1987,
"Complete inverted files for efficient text retrieval and analysis", for several texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.core import automaton_loops as loops

ROOT = loops.ROOT

_LEAST_TOKENS = 256
_STATES_PER_TOKEN, _EDGES_PER_TOKEN = 2, 3


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a text may go on with.

    Attributes:
        tokens: one after another.
        score: sum of their estimated chances of being right.
        matched: tokens of the match that they continue.
        state: behind that match.
        total: its occurrences, the context's own end not counted.
    """

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    matched: int = 0
    state: int = ROOT
    total: int = 0


class SuffixAutomaton:
    """Substrings of several texts with their counts. Not thread-safe. States are numbers, ``ROOT`` of nothing."""

    def __init__(self) -> None:
        self._num_tokens = self._room = 0
        self._used = np.array([1, 0], dtype=np.int64)
        self._states = np.array([[-1], [0], [0], [-1]], dtype=np.int32)
        self._edges = np.zeros((4, 0), dtype=np.int32)
        self._make_room(_LEAST_TOKENS)
        self._chains = np.zeros((2, 16), dtype=np.int64)
        self._figures = np.zeros(4)

    def __len__(self) -> int:
        """States."""
        return int(self._used[loops.STATES])

    def append(self, last: int, tokens: Sequence[int]) -> int:
        """Extend the text whose whole is state ``last`` (``ROOT`` begins one); the new whole."""
        self._num_tokens += len(tokens)
        if self._num_tokens > self._room:
            self._make_room(2 * self._num_tokens)
        return loops.append(
            self._states, self._edges, self._slots, self._used, last, _as_array(tokens)
        )

    def remove(self, tokens: Sequence[int]) -> None:
        """Take back the counts of a text that was appended from the root; states stay."""
        loops.remove(self._states, self._edges, self._slots, _as_array(tokens))

    def advance(self, state: int, matched: int, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest known suffix after more tokens, as state and length, 0 for none.

        Args:
            state: of the match so far, as it was told; later appends may have split it.
            matched: its tokens.
            tokens: that follow.
        """
        return loops.advance(
            self._states, self._edges, self._slots, state, matched, _as_array(tokens)
        )

    def suffix(self, state: int) -> tuple[int, int]:
        """The longest suffix of a whole text that ends elsewhere too, as state and length."""
        link = max(int(self._states[loops.LINK, state]), ROOT)
        return link, int(self._states[loops.LENGTH, link])

    def count(self, state: int) -> int:
        """Occurrences of a state's substrings."""
        return int(self._states[loops.COUNT, state])

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Next tokens with their states and counts, most frequent first, ties by lower id."""
        found = []
        edge = int(self._states[loops.FIRST, state])
        while edge >= 0:
            _, token, behind, following = self._edges[:, edge].tolist()
            if (count := self.count(behind)) > 0:
                found.append((token, behind, count))
            edge = following
        return sorted(found, key=lambda one: (-one[2], one[0]))

    def continuation(
        self,
        state: int,
        matched: int,
        *,
        factor: float,
        length: int,
        min_prob: float,
        is_own_end: bool,
    ) -> Continuation:
        """The best-scored of the likeliest continuations of a match and of its suffixes.

        Args:
            state: of the longest match, from ``advance`` or ``suffix``.
            matched: its tokens.
            factor: tokens proposed per matched one.
            length: tokens at most.
            min_prob: the chain ends where the product of its tokens' shares falls below.
            is_own_end: whether one occurrence of every match is the context's own end.
        """
        if length > self._chains.shape[1]:
            self._chains = np.zeros((2, length), dtype=np.int64)
        num_tokens = loops.continue_text(
            self._states, self._edges, state, matched, factor, length, min_prob, is_own_end,
            self._chains, self._figures,
        )  # fmt: skip
        if num_tokens == 0:
            return Continuation()
        score, *numbers = self._figures.tolist()
        tokens = tuple(self._chains[0, :num_tokens].tolist())
        return Continuation(tokens, score, *map(int, numbers))

    def _make_room(self, num_tokens: int) -> None:
        """Room for texts of so many tokens in all."""
        self._room = num_tokens
        num_states, num_edges = self._used.tolist()
        states = np.zeros((4, _STATES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        edges = np.zeros((4, _EDGES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        states[:, :num_states] = self._states[:, :num_states]
        edges[:, :num_edges] = self._edges[:, :num_edges]
        self._states, self._edges = states, edges
        num_slots = 1 << (2 * edges.shape[1]).bit_length()
        self._slots = np.full(num_slots, -1, dtype=np.int32)
        loops.hash_edges(edges, self._slots, num_edges)


def _as_array(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(tokens, dtype=np.int64)
