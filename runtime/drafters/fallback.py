"""A chain of drafters: each is asked for the rows its predecessors proposed nothing for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.drafters.base import Draft, DraftRow, Proposer


class FallbackDrafter:
    """Proposes what the first drafter with an idea does.

    Args:
        parts: in the order they are asked; their owner tells them of outcomes and ends.
    """

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self._parts = tuple(parts)

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """One draft per chosen slot; what a part did to the draft's cache is kept if it was empty.

        Raises:
            EngineError: the draft model failed; its caches of all live slots are undefined.
        """
        rows = list(live)
        found: dict[int, Draft] = {}
        open_slots = list(chosen)
        for part in self._parts:
            if not open_slots:
                break
            for slot, draft in zip(open_slots, part.propose(rows, open_slots), strict=True):
                if draft.num_computed is not None:
                    rows[slot] = replace(rows[slot], num_computed=draft.num_computed)
                elif slot in found and found[slot].num_computed is not None:
                    draft = replace(draft, num_computed=found[slot].num_computed)
                found[slot] = draft
            open_slots = [slot for slot in open_slots if not found[slot].tokens]
        return [found[slot] for slot in chosen]
