"""An engine that computes nothing: what a step takes with it is the host's time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import EngineLimits, FloatArray, Source, Span
from outrider.engines.spans import WithoutCopies


class NullEngine(WithoutCopies):
    """An engine whose logits are the same row at every position.

    ``row`` is [V] float32; a span may want ``max_wanted`` logits at most.
    """

    is_row_invariant = True
    packs_rows = False

    def __init__(self, limits: EngineLimits, row: FloatArray, *, max_wanted: int) -> None:
        self.limits = limits
        self._logits = np.tile(row, (limits.max_batch, max_wanted, 1))

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Return [B, R, V] float32, the same row everywhere."""
        wanted = max(span.num_logits for span in spans)
        return self._logits[: len(spans), :wanted]

    def read(self, sources: Sequence[Source]) -> None:
        """Do nothing: no sources are held."""

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Do nothing: no sources are held."""

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Do nothing: no tokens are held."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Do nothing: no tokens are held."""

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Do nothing: no tokens are held."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
