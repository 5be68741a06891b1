"""A chain of drafters: each is asked for the rows its predecessors expect too little of.

Source: hybrid of suffix decoding and a draft model, Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), where the
score of a continuation decides whether the model is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.runtime.drafters.base import Draft, DraftRow, Proposer


class FallbackDrafter:
    """Proposes the first draft that is expected to keep enough tokens, else the last one that is not empty.

    Args:
        parts: in the order they are asked, each with the tokens that it proposes at most, None for gamma. Their owner
            gives them outcomes and ends.
        share: a draft whose drafter says how many of its tokens it expects to be kept is taken at once if these are at
            least this share of the tokens that the next part may propose.

    Attributes:
        num_asked: parts that the last ``propose`` asked; where it raised, the last of them failed.
    """

    def __init__(self, parts: Sequence[tuple[Proposer, int | None]], *, share: float) -> None:
        self._parts = tuple(parts)
        self._share = share
        self.num_asked = 0

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Return one draft per chosen slot, with the draft model's cache as the last part that was asked left it."""
        rows = list(live)
        found: dict[int, Draft] = {}
        open_slots = list(chosen)
        for place, (part, most) in enumerate(self._parts):
            self.num_asked = place + 1
            asked = rows if most is None else _capped(rows, open_slots, most)
            for slot, draft in zip(open_slots, part.propose(asked, open_slots), strict=True):
                if draft.num_computed is not None:
                    rows[slot] = replace(rows[slot], num_computed=draft.num_computed)
                if draft.tokens or slot not in found:
                    found[slot] = draft
            open_slots = [
                slot for slot in open_slots if self._asks_next(place, rows[slot], found[slot])
            ]
            if not open_slots:
                break
        return [_with_cache(found[slot], live[slot], rows[slot]) for slot in chosen]

    def _asks_next(self, place: int, row: DraftRow, draft: Draft) -> bool:
        if place + 1 == len(self._parts):
            return False
        if not draft.tokens or draft.expected is None:
            return not draft.tokens
        most = self._parts[place + 1][1]
        room = row.gamma if most is None else min(row.gamma, most)
        return draft.expected < self._share * room


def _capped(rows: Sequence[DraftRow], slots: Sequence[int], most: int) -> list[DraftRow]:
    capped = list(rows)
    for slot in slots:
        if rows[slot].gamma > most:
            capped[slot] = replace(rows[slot], gamma=most)
    return capped


def _with_cache(draft: Draft, before: DraftRow, after: DraftRow) -> Draft:
    """Return the draft with the pointer into the draft model's cache that a part left behind."""
    if draft.num_computed is not None or after.num_computed == before.num_computed:
        return draft
    return replace(draft, num_computed=after.num_computed)
