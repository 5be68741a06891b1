"""What slots keep of layers with a sliding window: rings of columns in the cache, and how far a text may be cut.

A ring of C columns holds token p in column p mod C. A call writes it as other caches, padding included, so it
overwrites what stands C tokens before. Of a slot one integer says what must not be lost:

    [.. base - window + 1 ... base)  seen by the tokens from ``base`` on     [base ... length)  open

A span starts from ``base`` on, or at 0. Its mask asks for distances, not for columns (``export.graph.rings``).

Invariants:

* W1  No call overwrites a token that one from ``base`` on sees: ``base + max_open + max_extend - C`` at most is the
  first that stays (``engines.bundle.manifest``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from outrider.engines.base import FloatArray, Span
from outrider.engines.bundle.manifest import RingsEntry
from outrider.engines.kv_cache import KvCache
from outrider.engines.spans import cut_to_floors, floor_behind


class SlotRings:
    """The rings of all slots, in the memory of their cache.

    Args:
        entry: the window.
        cache: of the model.
    """

    def __init__(self, entry: RingsEntry, cache: KvCache) -> None:
        self._cache = cache
        # Tokens before one that it sees.
        self._num_before = entry.window - 1
        self.bases = [0] * len(cache.lengths)

    def commit(self, spans: Sequence[Span]) -> None:
        """Note what a call has settled."""
        for span in spans:
            self.bases[span.slot] = floor_behind(span, self.bases[span.slot])

    def move(self, source: int, destination: int, length: int) -> None:
        """Note a copy of one slot over another, whose text then has ``length`` tokens; none for 0."""
        self.bases[destination] = self.bases[source] if length else 0

    def read(self, slot: int) -> FloatArray:
        """Return [n] float32: a copy of what tokens from a slot's base on see before it."""
        rings = self._cache.rings
        parts = [held[:, slot][:, :, self._columns(slot, held)].reshape(-1) for held in rings]
        return np.concatenate(parts)

    def write(self, slot: int, length: int, values: FloatArray) -> None:
        """Let what ``read`` returned precede token ``length`` of a slot, whose rings held other texts."""
        self.bases[slot] = length
        for held in self._cache.rings:
            held[:, slot] = 0.0
            num_layers, _, num_heads, _, size = held.shape
            columns = self._columns(slot, held)
            shape = (num_layers, num_heads, len(columns), size)
            part, values = np.split(values, [math.prod(shape)])
            held[:, slot][:, :, columns] = part.reshape(shape)

    def size(self, length: int) -> int:
        """Return the numbers that ``read`` returns of a base of so many tokens."""
        num_columns = min(length, self._num_before)
        return sum(num_columns * held[:, 0, :, 0].size for held in self._cache.rings)

    def trimmed(self, lengths: Sequence[int | None]) -> list[int | None]:
        """Return the lengths that slots can be cut to, and forget those of which that is nothing."""
        return cut_to_floors(lengths, self.bases)

    def kept_of(self, slot: int) -> FloatArray:
        """Return [n] float32: a copy of all columns of a slot."""
        return np.concatenate([held[:, slot].reshape(-1) for held in self._cache.rings])

    def _columns(self, slot: int, held: FloatArray) -> list[int]:
        """Return where the tokens stand that precede a slot's base, in order."""
        base, num_columns = self.bases[slot], held.shape[3]
        return [token % num_columns for token in range(max(0, base - self._num_before), base)]
