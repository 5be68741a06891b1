"""Calls of a graph that packs its rows, on the CPU: bound once per shape, over arrays that all calls share.

Ragged batches have many shapes, of which a server sees new ones all day. All calls read and write the beginnings of the
same arrays, so that a new shape needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engines.base import EngineLimits, FloatArray, IntArray, Span
from outrider.engines.bundle.names import CACHE_COLUMNS
from outrider.engines.kv_cache import MIN_SPAN, zeros
from outrider.engines.onnx.packed_inputs import (
    PackedGraph,
    PackedInputs,
    PackedShape,
    cache_columns,
)
from outrider.engines.onnx.packed_loops import spread


class PackedMemory:
    """The arrays that all calls read and write.

    Args:
        graph: which asks for them.
        limits: of the engine.
        least_rows: packed rows, and wanted ones, are at least so many; what is missing is padding.

    Attributes:
        inputs: of all calls.
        logits: [at least M and B * R, V] float32, of all calls.
    """

    def __init__(self, graph: PackedGraph, limits: EngineLimits, *, least_rows: int) -> None:
        self.inputs = PackedInputs(graph, least_rows=least_rows, room=limits.max_extend)
        self.logits = zeros((MIN_SPAN, limits.vocab_size))

    def reserve(self, sizes: PackedShape) -> bool:
        """Make room for a call; whether memory was replaced, so that every call has to be bound anew."""
        num_logits = max(self.inputs.counts(sizes)[1], sizes.num_rows * sizes.num_wanted)
        num_rows, vocab_size = self.logits.shape
        logits = self.logits
        if num_logits > num_rows:
            # Before anything is replaced: there may not be the memory.
            logits = zeros((max(num_logits, 2 * num_rows), vocab_size))
        has_new_inputs, has_new_logits = self.inputs.reserve(sizes), logits is not self.logits
        self.logits = logits
        return has_new_inputs or has_new_logits

    def rectangle(self, num_rows: int, num_wanted: int) -> FloatArray:
        """Logits as [num_rows, num_wanted, V] float32, which there is room for."""
        return self.logits[: num_rows * num_wanted].reshape(num_rows, num_wanted, -1)


class PackedCall:
    """A call of one shape."""

    def __init__(
        self,
        memory: PackedMemory,
        sizes: PackedShape,
        capacity: int,
        bind: Callable[[dict[str, IntArray | FloatArray], FloatArray], Callable[[], object]],
    ) -> None:
        self._memory, self._sizes = memory, sizes
        self._columns = cache_columns(capacity)
        inputs = {**memory.inputs.views(sizes), CACHE_COLUMNS: self._columns}
        self.run = bind(inputs, memory.logits[None, : memory.inputs.counts(sizes)[1]])
        num_logits = sizes.num_rows * sizes.num_wanted
        self._is_even = sizes.all_wanted == num_logits
        self._logits = memory.rectangle(sizes.num_rows, sizes.num_wanted)

    def fill(self, spans: Sequence[Span]) -> None:
        """Write spans of the call's sizes."""
        self._memory.inputs.fill(spans, self._sizes)

    def answer(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32; padding columns hold anything."""
        if not self._is_even:
            memory, sizes = self._memory, self._sizes
            spread(memory.inputs.spans, sizes.num_rows, sizes.num_wanted, memory.logits)
        return self._logits
