"""Prompt lookup: copy what followed the last time the context ended like this.

Source: Saxena, "Prompt Lookup Decoding" (2023); here the longest suffix wins, then the most recent
match, a continuation shorter than gamma is used as it is, and no match means no draft.
"""

from __future__ import annotations

from typing import Self

from runtime.drafters.base import DrafterParts, DraftRow
from runtime.drafters.chain import ChainDrafter


class LookupIndex:
    """Where each short n-gram of a growing text last ended, in O(longest - shortest) per token.

    An n-gram enters when the token after it is known: whatever is found can be continued.
    """

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def push(self, tokens: list[int]) -> None:
        """Append tokens."""
        known, ends = self._tokens, self._ends
        first = len(known)
        known += tokens
        for end in range(max(first, 1), len(known)):
            for length in self._lengths:
                if length <= end:
                    ends[tuple(known[end - length : end])] = end

    def find(self, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """At most ``length`` tokens that followed the longest known suffix of text and drafted."""
        longest = self._lengths.start
        suffix = (*self._tokens[-longest:], *drafted)[-longest:]
        for size in self._lengths:
            if size <= len(suffix):
                end = self._ends.get(suffix[len(suffix) - size :])
                if end is not None:
                    return tuple(self._tokens[end : end + length])
        return ()


class LookupDrafter(ChainDrafter[LookupIndex]):
    """Proposes continuations copied from the committed tokens."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        super().__init__()
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """With the server's n-gram lengths."""
        config = parts.config
        return cls(min_ngram=config.lookup_min_ngram, max_ngram=config.lookup_max_ngram)

    def new_state(self, row: DraftRow) -> LookupIndex:
        """An empty index."""
        return LookupIndex(min_ngram=self._min_ngram, max_ngram=self._max_ngram)

    def push(self, state: LookupIndex, tokens: list[int]) -> None:
        """Index committed tokens."""
        state.push(tokens)

    def extend(self, state: LookupIndex, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Copy from the most recent match of the longest suffix."""
        return state.find(drafted, length)
