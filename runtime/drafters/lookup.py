"""Prompt lookup: copy what followed the last time the context ended like this.

Source: Saxena, "Prompt Lookup Decoding" (2023); here the longest suffix wins, then the most recent
match, a continuation shorter than gamma is used as it is, and no match means no draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.base import IntArray
from runtime.drafters.base import Draft, DraftRow


class LookupDrafter:
    """Proposes continuations copied from the committed tokens."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """A copied continuation per chosen slot, cut after its first end token."""
        return [self._draft(live[slot]) for slot in chosen]

    def _draft(self, row: DraftRow) -> Draft:
        copied = find_continuation(
            row.sampling.history,
            max_length=row.gamma,
            min_ngram=self._min_ngram,
            max_ngram=self._max_ngram,
        )
        ends = [i for i, token in enumerate(copied) if token in row.sampling.law.end_token_ids]
        return Draft(tokens=copied[: ends[0] + 1] if ends else copied)


def find_continuation(
    history: IntArray, *, max_length: int, min_ngram: int, max_ngram: int
) -> tuple[int, ...]:
    """Tokens that followed the most recent earlier occurrence of the longest known suffix.

    Args:
        history: [n] int64 committed tokens.
        max_length: tokens wanted at most.
        min_ngram: shortest suffix that counts as a match.
        max_ngram: longest suffix tried.

    Returns:
        At most ``max_length`` tokens; empty without a match.
    """
    num_tokens = len(history)
    found: int | None = None
    ends = np.arange(num_tokens - 1)
    for offset in range(min(max_ngram, num_tokens - 1)):
        # An occurrence ending at e matches offset + 1 tokens when history[e - offset] agrees too.
        ends = ends[ends >= offset]
        ends = ends[history[ends - offset] == history[num_tokens - 1 - offset]]
        if not len(ends):
            break
        if offset + 1 >= min_ngram:
            found = int(ends[-1])
    if found is None:
        return ()
    return tuple(history[found + 1 : found + 1 + max_length].tolist())
