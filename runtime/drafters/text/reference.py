"""LLMA: copy from a reference text that came with the request.

The text is what the answer is expected to quote: the document to summarise, the code to edit.
Source: Yang et al. 2023, "Inference with Reference" (arXiv:2304.04487); here the longest suffix
wins, then the most recent match behind the place copied from last, so that repeated lines are
followed in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DraftRow
from outrider.runtime.drafters.chain import ChainDrafter


@dataclass(slots=True)
class ReferenceState:
    """A reference, where its n-grams end, and the context's last tokens.

    Attributes:
        ends: n-gram -> positions after it, ascending.
        place: position in the reference behind the last committed match.
    """

    reference: tuple[int, ...]
    ends: dict[tuple[int, ...], list[int]]
    suffix: tuple[int, ...] = ()
    place: int = 0


class ReferenceDrafter(ChainDrafter[ReferenceState]):
    """Proposes continuations copied from the request's reference tokens."""

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__(config)
        self._lengths = range(config.lookup_max_ngram, config.lookup_min_ngram - 1, -1)

    def new_state(self, row: DraftRow) -> ReferenceState:
        """Return the index of the reference, made once per request."""
        reference = row.params.reference_tokens
        ends: dict[tuple[int, ...], list[int]] = {}
        for length in self._lengths:
            for end in range(length, len(reference)):
                ends.setdefault(reference[end - length : end], []).append(end)
        return ReferenceState(reference=reference, ends=ends)

    def push(self, state: ReferenceState, tokens: list[int]) -> None:
        """Follow the committed tokens through the reference."""
        longest = self._lengths.start
        for token in tokens[-2 * longest :]:
            if state.reference[state.place : state.place + 1] == (token,):
                state.place += 1
            state.suffix = (*state.suffix, token)[-longest:]
            end = self._find(state, state.suffix)
            if end is not None:
                state.place = end

    def end_text(self, state: ReferenceState) -> None:
        """Begin at the reference's beginning: a source is not the answer that quotes it."""
        state.suffix, state.place = (), 0

    def extend(
        self, state: ReferenceState, drafted: tuple[int, ...], length: int
    ) -> tuple[int, ...]:
        """Copy the tokens that follow the match in the reference."""
        end = self._find(state, (*state.suffix, *drafted)[-self._lengths.start :])
        return state.reference[end : end + length] if end is not None else ()

    def _find(self, state: ReferenceState, suffix: tuple[int, ...]) -> int | None:
        """Return the match of the longest suffix at or behind the place, else the last one before it."""
        for size in self._lengths:
            ends = state.ends.get(suffix[len(suffix) - size :]) if size <= len(suffix) else None
            if ends:
                return next((end for end in ends if end >= state.place), ends[-1])
        return None
