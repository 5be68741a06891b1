"""Prompt lookup: copy what followed the last time the context ended like this.

Source: Saxena, "Prompt Lookup Decoding" (2023); here the longest suffix wins, then the most recent
match, a continuation shorter than gamma is used as it is, and no match means no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from outrider.engines.base import IntArray
from outrider.engines.jit import address
from outrider.runtime.core.drafting import HistoryScope
from outrider.runtime.drafters.base import Draft, DrafterParts, DraftRow, Outcome, Text, Traits
from outrider.runtime.drafters.chain import cut_at_end, pieces
from outrider.runtime.drafters.text import lookup_loops as loops


class LookupDrafter:
    """Proposes continuations copied from the committed tokens."""

    traits: ClassVar[Traits] = Traits(is_guesser=True)

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        # By request, where its tokens are; the arrays are kept, since loops read from there.
        self._places: dict[str, tuple[IntArray, int]] = {}

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """With the server's n-gram lengths."""
        config = parts.config
        return cls(min_ngram=config.lookup_min_ngram, max_ngram=config.lookup_max_ngram)

    def continue_texts(
        self, texts: Sequence[Text], lengths: Sequence[int], scope: HistoryScope
    ) -> list[tuple[int, ...]]:
        """What followed the most recent match of each text's longest suffix."""
        asked: list[int] = []
        places = self._places
        for text, length in zip(texts, lengths, strict=True):
            place = places.get(text.spec.internal_id)
            if place is None:
                place = text.tokens, address(text.tokens)
                places[text.spec.internal_id] = place
            asked += (place[1], text.num_known, length)
        found = np.empty(len(texts) * (1 + max(lengths)), dtype=np.int64)
        rows = np.array(asked, dtype=np.int64)
        loops.find_all(rows, self._min_ngram, self._max_ngram, found)
        each = pieces(found, len(texts))
        return [
            cut_at_end(tokens, text.spec.params.end_token_ids) if tokens else tokens
            for tokens, text in zip(each, texts, strict=True)
        ]

    def note_texts(self, texts: Sequence[Text]) -> None:
        """Learns nothing."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """A copied chain per chosen slot."""
        rows = [live[slot] for slot in chosen]
        return [
            Draft(
                tokens=cut_at_end(self.guess(row, (), row.gamma), row.sampling.params.end_token_ids)
            )
            for row in rows
        ]

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Copy from the most recent match of the longest suffix; see ``Guesser``."""
        history, behind = row.sampling.history, np.array(drafted, dtype=np.int64)
        place, size = loops.find(history, behind, self._min_ngram, self._max_ngram)
        return tuple(history[place : place + length].tolist()) if size else ()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns nothing."""

    def forget(self, key: str) -> None:
        """Drop where the request's tokens are."""
        self._places.pop(key, None)
