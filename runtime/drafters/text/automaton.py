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

import numpy as np
from outrider.engines.jit import address
from outrider.runtime.drafters.text import automaton_loops as loops

ROOT = loops.ROOT

_LEAST_TOKENS = 256
_ROOT_ALONE = np.array([[-1], [0], [0], [-1]], dtype=np.int32)
_NO_EDGES = np.zeros((4, 0), dtype=np.int32)


class SuffixAutomaton:
    """Substrings of several texts with their counts. Not thread-safe. States are numbers, ``ROOT`` of nothing.

    Attributes:
        used: [HEADER] int64, the same array for life; see ``runtime.drafters.text.automaton_loops``.
        at: its address; compiled loops find everything from there.
    """

    def __init__(self) -> None:
        self.used = np.zeros(loops.HEADER, dtype=np.int64)
        self.at = address(self.used)
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self.used[loops.STATES], self.used[loops.EDGES], self.used[loops.TOKENS] = 1, 0, 0
        self.used[loops.CLEARED] += 1
        self._states, self._edges = _ROOT_ALONE, _NO_EDGES
        self.make_room(_LEAST_TOKENS)

    def __len__(self) -> int:
        """States."""
        return int(self.used[loops.STATES])

    def append(self, last: int, tokens: Sequence[int]) -> int:
        """Extend the text whose whole is state ``last`` (``ROOT`` begins one); the new whole."""
        num_tokens = int(self.used[loops.TOKENS]) + len(tokens)
        if num_tokens > self.used[loops.ROOM]:
            self.make_room(2 * num_tokens)
        self.used[loops.TOKENS] = num_tokens
        return loops.append(
            self._states, self._edges, self._slots, self.used, last, _as_array(tokens)
        )

    def remove(self, tokens: Sequence[int]) -> None:
        """Take back the counts of a text that was appended from the root; states stay."""
        loops.remove(self._states, self._edges, self._slots, _as_array(tokens))

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

    def make_room(self, num_tokens: int) -> None:
        """Room for texts of so many tokens in all."""
        used = self.used
        num_states, num_edges = int(used[loops.STATES]), int(used[loops.EDGES])
        states = np.zeros((4, loops.STATES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        edges = np.zeros((4, loops.EDGES_PER_TOKEN * num_tokens + 1), dtype=np.int32)
        states[:, :num_states] = self._states[:, :num_states]
        edges[:, :num_edges] = self._edges[:, :num_edges]
        slots = np.full(1 << (2 * edges.shape[1]).bit_length(), -1, dtype=np.int32)
        loops.hash_edges(edges, slots, num_edges)
        self._states, self._edges, self._slots = states, edges, slots
        used[loops.STATES_AT] = address(states)
        used[loops.EDGES_AT] = address(edges)
        used[loops.SLOTS_AT] = address(slots)
        used[loops.ROOM], used[loops.NUM_SLOTS] = num_tokens, len(slots)


def _as_array(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(tokens, dtype=np.int64)
