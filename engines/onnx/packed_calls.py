"""Calls of a graph that packs its rows, on the CPU: bound once per shape, from values kept.

Ragged batches have many shapes, of which a server sees new ones all day, and making a call's arrays and values, with
code that the last pass over the weights pushed out of the processor's caches, takes a tenth of a small model's pass. So
all calls read and write the beginnings of the same arrays, and ONNX Runtime's values over these are kept by size, those
of batches that decode made when a model is opened: what a shape that was not seen yet takes is putting thirty of them
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import onnxruntime
from outrider.engines.base import EngineLimits, FloatArray, IntArray, Span
from outrider.engines.bundle.manifest import CACHE_COLUMNS, LOGITS
from outrider.engines.kv_cache import MIN_SPAN, zeros
from outrider.engines.onnx.packed_inputs import (
    PackedGraph,
    PackedInputs,
    PackedShape,
    Shapes,
    cache_columns,
)
from outrider.engines.onnx.packed_loops import spread

# Packed rows, and wanted ones, of calls whose values are made before they come: 1 ms a model.
_MADE_BEFORE = 128
# Sizes that are kept; beyond, all are made anew.
_MAX_KEPT = 512

Size = TypeVar("Size", bound=Hashable)
Kept = TypeVar("Kept")
Values = Sequence[tuple[str, onnxruntime.OrtValue]]


class KeptValues(dict[Size, Kept]):
    """Values by size, made when they are first asked for."""

    def __init__(self, make: Callable[[Size], Kept]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, size: Size) -> Kept:
        """Make the values of a size."""
        if len(self) >= _MAX_KEPT:
            self.clear()
        values = self[size] = self._make(size)
        return values


class BoundCaches(NamedTuple):
    """Values over the caches of slots in a row: one memory as past and as present.

    Attributes:
        past: by name of the input.
        present: by name of the output.
    """

    past: Values
    present: Values

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Bind them to a call."""
        for name, value in self.past:
            binding.bind_ortvalue_input(name, value)
        for name, value in self.present:
            binding.bind_ortvalue_output(name, value)


class PackedMemory:
    """What all calls read and write, and values over its beginnings.

    Args:
        graph: which asks for it.
        limits: of the engine.
        least_rows: packed rows, and wanted ones, are at least so many: the rest is padding.

    Attributes:
        inputs: of all calls.
        logits: [at least M and B * R, V] float32, of all calls.
        of_tokens: inputs with N rows, by N.
        of_wanted: inputs with M rows, by M.
        of_logits: the answer [1, M, V], by M.
        of_rectangle: inputs that attention's rectangle fixes, by B and T.
        of_columns: numbers of the cache's columns, by S.
    """

    def __init__(self, graph: PackedGraph, limits: EngineLimits, *, least_rows: int) -> None:
        self.inputs = PackedInputs(graph, least_rows=least_rows, room=limits.max_extend)
        self.logits = zeros((MIN_SPAN, limits.vocab_size))
        self.of_tokens = KeptValues[int, Values](lambda n: self._inputs_of(graph.of_tokens(n)))
        self.of_wanted = KeptValues[int, Values](lambda n: self._inputs_of(graph.of_wanted(n)))
        self.of_logits = KeptValues[int, Values](self._logits_of)
        self.of_rectangle = KeptValues[tuple[int, int], Values](
            lambda sides: self._inputs_of(graph.of_rectangle(*sides))
        )
        self.of_columns = KeptValues[int, Values](_columns)
        self._make_before()

    def reserve(self, sizes: PackedShape) -> bool:
        """Make room for a call; whether memory was replaced, so that every call has to be bound anew."""
        num_logits = max(self.inputs.counts(sizes)[1], sizes.num_rows * sizes.num_wanted)
        num_rows, vocab_size = self.logits.shape
        logits = self.logits
        if num_logits > num_rows:
            # Before anything is replaced: there may not be the memory.
            logits = zeros((max(num_logits, 2 * num_rows), vocab_size))
        replaced: list[KeptValues[int, Values] | KeptValues[tuple[int, int], Values]] = []
        if self.inputs.reserve(sizes):
            replaced += self.of_tokens, self.of_wanted, self.of_rectangle
        if logits is not self.logits:
            self.logits = logits
            replaced.append(self.of_logits)
        for kept in replaced:
            kept.clear()
        if replaced:
            self._make_before()
        return bool(replaced)

    def _make_before(self) -> None:
        for count in range(1, _MADE_BEFORE + 1):
            _ = self.of_tokens[count], self.of_wanted[count]
        for count in range(1, min(_MADE_BEFORE, len(self.logits)) + 1):
            _ = self.of_logits[count]

    def _inputs_of(self, shapes: Shapes) -> Values:
        arrays = self.inputs.arrays
        return [
            (name, value_over(arrays[name][: math.prod(axes)].reshape(axes)))
            for name, axes in shapes.items()
        ]

    def _logits_of(self, count: int) -> Values:
        return [(LOGITS, value_over(self.logits[None, :count]))]


class PackedCall:
    """Calls of one shape from a slot on.

    Args:
        session: over the graph.
        caches: of the slots.
        memory: with room for the call.
        sizes: of the call.
        capacity: S.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        caches: BoundCaches,
        memory: PackedMemory,
        sizes: PackedShape,
        *,
        capacity: int,
    ) -> None:
        binding = session.io_binding()
        self.run: Callable[[], object] = partial(session.run_with_iobinding, binding)
        num_tokens, num_wanted = memory.inputs.counts(sizes)
        caches.bind(binding)
        for values in (
            memory.of_columns[capacity],
            memory.of_tokens[num_tokens],
            memory.of_wanted[num_wanted],
            memory.of_rectangle[sizes.num_rows, sizes.num_tokens],
        ):
            for name, value in values:
                binding.bind_ortvalue_input(name, value)
        for name, value in memory.of_logits[num_wanted]:
            binding.bind_ortvalue_output(name, value)
        self._memory, self._sizes, self._is_even = memory, sizes, sizes.is_even
        num_logits = sizes.num_rows * sizes.num_wanted
        self._logits = memory.logits[:num_logits].reshape(sizes.num_rows, sizes.num_wanted, -1)

    def fill(self, spans: Sequence[Span]) -> None:
        """Write spans of the call's sizes."""
        self._memory.inputs.fill(spans, self._sizes)

    def answer(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32; padding columns hold anything."""
        if not self._is_even:
            memory, sizes = self._memory, self._sizes
            spread(memory.inputs.spans, sizes.num_rows, sizes.num_wanted, memory.logits)
        return self._logits


def value_over(array: IntArray | FloatArray) -> onnxruntime.OrtValue:
    """Value over an array's own memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _columns(capacity: int) -> Values:
    return [(CACHE_COLUMNS, value_over(cache_columns(capacity)))]
