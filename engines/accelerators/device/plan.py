"""The plan contract: one plan of an engine, whatever library runs it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from outrider.engines.bundle.plans import PlanEntry, Shape


class LoadedPlan(Protocol):
    """One plan on a device."""

    @property
    def entry(self) -> PlanEntry:
        """Entry of the plan in the manifest."""
        ...

    @property
    def is_by_token(self) -> bool:
        """True where caches of texts are [rows, capacity, heads * size], else [rows, heads, capacity, size]."""
        ...

    @property
    def inputs(self) -> Set[str]:
        """Names of the tensors that the graph reads."""
        ...

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Enqueue the graph.

        Args:
            profile: index into ``entry.profiles``; it holds the shape.
            shape: rows, tokens and wanted logits.
            addresses: of every input and output by name; a cache's past and present are the same.
        """
        ...

    def close(self) -> None:
        """Free what the plan holds on the device."""
        ...
