"""The drafter that never drafts: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.drafters.base import Draft, DraftRow


class NoDrafter:
    """Proposes nothing."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """An empty draft per chosen slot."""
        return [Draft(tokens=()) for _ in chosen]
