"""Prompt lookup: copy what followed the last time the context ended like this.

Source: Saxena, "Prompt Lookup Decoding" (2023); here the longest suffix wins, then the most recent
match, a continuation shorter than gamma is used as it is, and no match means no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from numba import int64, types
from outrider.engines.base import IntArray
from outrider.engines.jit import njit_exact
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Outcome,
)
from outrider.runtime.drafters.chain import guessed_chain

_IDS = int64[::1]


@njit_exact(types.UniTuple(int64, 2)(_IDS, _IDS, int64, int64, int64))
def find(
    text: IntArray, context: IntArray, shortest: int, longest: int, place: int
) -> tuple[int, int]:
    """Find the longest end of a context in a text: the first one at or behind a place, else the last one before it.

    The text is searched from its end each time, a nanosecond per token, so that nothing is kept per request.

    Args:
        text: [n] int64; an occurrence has at least one more token of it behind. Those below 0 are none, and stand in
            it once at most: nothing that holds one is found.
        context: [m] int64, which may be the text's own end.
        shortest: tokens of an end at least.
        longest: at most.
        place: in the text.

    Returns:
        The place behind the occurrence, and the occurrence's length; 0 and 0 for none.
    """
    num = len(context)
    found = size = 0
    for end in range(len(text) - 1, 0, -1):
        if text[end] < 0:
            continue
        same = 0
        while same < min(longest, end, num) and text[end - 1 - same] == context[num - 1 - same]:
            same += 1
        if same >= shortest and (same > size or (same == size and end >= place)):
            found, size = end, same
        if size == longest and end <= place:
            break
    return found, size


class LookupDrafter:
    """Proposes continuations copied from the committed tokens."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(is_guesser=True)

    def __init__(self, config: DraftingConfig) -> None:
        self._shortest, self._longest = config.lookup_min_ngram, config.lookup_max_ngram

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build it with the server's n-gram lengths."""
        return cls(parts.config)

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Copy a chain per chosen slot."""
        return [guessed_chain(self, live[slot]) for slot in chosen]

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Copy from the most recent match of the longest suffix; see ``Guesser``."""
        text, context = row.text, row.text[-self._longest :]
        if drafted:
            context = np.concatenate((context, np.array(drafted, dtype=np.int64)))
        place, size = find(text, context, self._shortest, self._longest, len(text))
        if not size:
            return ()
        # What is copied from a source ends with it.
        end = len(row.quoted) if place < len(row.quoted) else len(text)
        return tuple(text[place : min(place + length, end)].tolist())

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn nothing."""

    def forget(self, key: str) -> None:
        """Keep nothing."""
