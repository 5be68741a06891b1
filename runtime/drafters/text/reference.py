"""LLMA: copy from a reference text that came with the request.

The text is what the answer is expected to quote: the document to summarise, the code to edit.
Source: Yang et al. 2023, "Inference with Reference" (arXiv:2304.04487); here the longest suffix
wins, then the most recent match behind the place copied from last, so that repeated lines are
followed in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DraftRow
from outrider.runtime.drafters.chain import ChainDrafter
from outrider.runtime.drafters.text.lookup import find


@dataclass(slots=True)
class ReferenceState:
    """A reference, and the context's last tokens.

    Attributes:
        reference: [n] int64.
        place: in the reference, behind the last committed match.
    """

    reference: IntArray
    suffix: tuple[int, ...] = ()
    place: int = 0


class ReferenceDrafter(ChainDrafter[ReferenceState]):
    """Proposes continuations copied from the request's reference tokens."""

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__(config)
        self._shortest, self._longest = config.lookup_min_ngram, config.lookup_max_ngram

    def new_state(self, row: DraftRow) -> ReferenceState:
        """Return the beginning of the reference."""
        return ReferenceState(np.array(row.params.reference_tokens, dtype=np.int64))

    def push(self, state: ReferenceState, tokens: list[int]) -> None:
        """Follow the committed tokens through the reference."""
        for token in tokens[-2 * self._longest :]:
            if state.place < len(state.reference) and state.reference[state.place] == token:
                state.place += 1
            state.suffix = (*state.suffix, token)[-self._longest :]
            state.place = self._find(state, state.suffix) or state.place

    def end_text(self, state: ReferenceState) -> None:
        """Begin at the reference's beginning: a source is not the answer that quotes it."""
        state.suffix, state.place = (), 0

    def extend(
        self, state: ReferenceState, drafted: tuple[int, ...], length: int
    ) -> tuple[int, ...]:
        """Copy the tokens that follow the match in the reference."""
        end = self._find(state, (*state.suffix, *drafted))
        return tuple(state.reference[end : end + length].tolist()) if end else ()

    def _find(self, state: ReferenceState, context: tuple[int, ...]) -> int:
        """Return the match of the longest end at or behind the place, else the last one before it; 0 for none."""
        ids = np.array(context, dtype=np.int64)
        return find(state.reference, ids, self._shortest, self._longest, state.place)[0]
