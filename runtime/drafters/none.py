"""The drafter that never drafts: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Outcome,
)


class NoDrafter:
    """Proposes nothing."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities()

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build it from nothing."""
        return cls()

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Return an empty draft per chosen slot."""
        return [Draft(tokens=()) for _ in chosen]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn nothing."""

    def forget(self, key: str) -> None:
        """Keep nothing."""
