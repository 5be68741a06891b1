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
from typing import NamedTuple

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.drafters.text import automaton_loops as loops

ROOT = loops.ROOT

_LEAST_TOKENS = 256
_STATES_PER_TOKEN, _EDGES_PER_TOKEN = 2, 3
_ROOT_ALONE = np.array([[-1], [0], [0], [-1]], dtype=np.int32)
_NO_EDGES = np.zeros((4, 0), dtype=np.int32)
_NO_TOKENS = np.zeros(0, dtype=np.int64)


class Continuation(NamedTuple):
    """The likeliest continuation of a match.

    Attributes:
        tokens: [m] int64, likeliest one after another; empty for none.
        score: sum of the tokens' estimated probabilities.
        matched: tokens of the match that is continued.
        state: of the match.
        total: its occurrences.
    """

    tokens: IntArray
    score: float
    matched: int
    state: int
    total: int


class SuffixAutomaton:
    """Substrings of several texts with their counts. Not thread-safe. States are numbers, ``ROOT`` is the empty text's.

    Attributes:
        num_cleared: times that all texts were forgotten; states found before are void.
    """

    def __init__(self) -> None:
        self._used = np.zeros(2, dtype=np.int64)
        self.num_cleared = 0
        self._forget()

    def clear(self) -> None:
        """Forget all texts."""
        self.num_cleared += 1
        self._forget()

    def __len__(self) -> int:
        """Return the number of states."""
        return int(self._used[loops.STATES])

    def append(self, last: int, tokens: Sequence[int]) -> int:
        """Extend a text and return the state of its whole.

        Args:
            last: state of the whole text so far; ``ROOT`` begins a new one.
            tokens: that follow.
        """
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
        """Return state and length of the longest known end of a match and the tokens behind it."""
        return loops.advance(
            self._states, self._edges, self._slots, state, matched, _as_array(tokens)
        )

    def longest_earlier(self, whole: int) -> tuple[int, int]:
        """Return state and length of a text's longest end that occurs elsewhere too, which may be all of it."""
        is_elsewhere = whole != ROOT and self.count(whole) > 1
        state = whole if is_elsewhere else max(self._states.item(loops.LINK, whole), ROOT)
        return state, self._states.item(loops.LENGTH, state)

    def continuation(
        self,
        place: tuple[int, int],
        drafted: Sequence[int],
        length: int,
        *,
        factor: float,
        min_prob: float,
        is_own_end: bool = False,
    ) -> Continuation:
        """Return the best-scored continuation of a match and of its suffixes.

        Args:
            place: state and length of the match.
            drafted: tokens behind it.
            length: tokens at most.
            factor: tokens proposed per matched one.
            min_prob: the chain ends where the product of its tokens' shares falls below.
            is_own_end: the match is the end of a text in this automaton, which nothing follows yet.
        """
        behind = _as_array(drafted) if drafted else _NO_TOKENS
        return Continuation(
            *loops.continue_text(
                self._states, self._edges, self._slots, *place, behind, is_own_end and not drafted,
                length, factor, min_prob,
            )
        )  # fmt: skip

    def count(self, state: int) -> int:
        """Return the occurrences of a state's substrings."""
        return int(self._states[loops.COUNT, state])

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Return next tokens with their states and counts, most frequent first, ties by lower id."""
        found = []
        edge = int(self._states[loops.FIRST, state])
        while edge >= 0:
            _, token, behind, following = self._edges[:, edge].tolist()
            if (count := self.count(behind)) > 0:
                found.append((token, behind, count))
            edge = following
        return sorted(found, key=lambda one: (-one[2], one[0]))

    def _forget(self) -> None:
        self._used[loops.STATES], self._used[loops.EDGES], self._num_tokens = 1, 0, 0
        self._states, self._edges = _ROOT_ALONE, _NO_EDGES
        self._make_room(_LEAST_TOKENS)

    def _make_room(self, num_tokens: int) -> None:
        """Hold texts of so many tokens in all."""
        num_states, num_edges = self._used.tolist()
        states = np.zeros((4, _STATES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        edges = np.zeros((4, _EDGES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        states[:, :num_states] = self._states[:, :num_states]
        edges[:, :num_edges] = self._edges[:, :num_edges]
        slots = np.full(1 << (2 * edges.shape[1]).bit_length(), -1, dtype=np.int32)
        loops.hash_edges(edges, slots, num_edges)
        self._states, self._edges, self._slots = states, edges, slots
        self._room = num_tokens


def _as_array(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int64)
