"""The calls of a model on the CPU: bound once per shape and kept; each run writes its numbers into bound arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime
from outrider.engines.base import EngineLimits, FloatArray, IntArray, Span
from outrider.engines.buffers import int64_view
from outrider.engines.bundle.names import (
    FEATURES,
    LOGIT_POSITIONS,
    LOGITS,
    RECYCLED,
    START,
    TOKENS,
)
from outrider.engines.kv_cache import MIN_SPAN, KvCache, zeros
from outrider.engines.onnx.packed_calls import PackedCall, PackedMemory
from outrider.engines.onnx.packed_inputs import PackedGraph, PackedShape
from outrider.engines.onnx.session import bind_caches
from outrider.engines.onnx.sources import OnnxSources
from outrider.engines.onnx.states import SlotStates, StatePlaces
from outrider.engines.onnx.trees import TreeGraphs
from outrider.engines.tree_inputs import TreeInputs

# A server sees few decode and verify shapes but many prefill tails and ragged batches; beyond this many the kept
# calls are dropped and built anew.
_MAX_CALLS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCall:
    """A call of B rows of T tokens and R wanted logits each; see ``engines.buffers.elements``.

    Attributes:
        run: runs the graph over what is bound.
        num_tokens: T.
        tokens: elements of [B, T] int64.
        start: elements of [B] int64.
        logit_positions: elements of [B, R] int64.
        logits: [B, R, V] float32, where the answer will be.
        last_position: greatest that the model knows.
        places: of the rows in what slots keep of recurrent layers; None of a model without.
        tree: arrays of a call in which some row is a tree, else None.
        features: [B, T, F] float32, what a head reads beside the tokens; None of any other model.
        recycled: [B, T, F] float32, where what a head would have read of these tokens will be.
    """

    run: Callable[[], object]
    num_tokens: int
    tokens: memoryview[int]
    start: memoryview[int]
    logit_positions: memoryview[int]
    logits: FloatArray
    last_position: int
    tree: TreeInputs | None
    places: StatePlaces | None = None
    features: FloatArray | None = None
    recycled: FloatArray | None = None

    def fill(self, spans: Sequence[Span]) -> None:
        """Write spans, each one's last token and last wanted position repeated as padding."""
        for row, span in enumerate(spans):
            self._fill_row(row, span)

    def answer(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32; padding columns repeat a column of the same row."""
        return self.logits

    def _fill_row(self, row: int, span: Span) -> None:
        tokens, at = self.tokens, row * self.num_tokens
        token = 0
        for token in span.tokens:
            tokens[at] = token
            at += 1
        for padding in range(at, (row + 1) * self.num_tokens):
            tokens[padding] = token
        self.start[row] = span.start
        if self.features is not None:
            # All calls write here: what is left of another text, a NaN too, would reach this one's caches.
            self.features[row, len(span.tokens) :] = 0
            if span.features is not None:
                self.features[row, : len(span.tokens)] = span.features
        if self.tree is not None:
            self.tree.fill_row(row, span, self.last_position)
        first, last = len(span.tokens) - span.num_logits, max(0, len(span.tokens) - 1)
        num_wanted = self.logits.shape[1]
        for at in range(num_wanted):
            self.logit_positions[row * num_wanted + at] = min(first + at, last)


Call = PaddedCall | PackedCall
Run = Callable[[], object]
Columns = tuple[int, int]


class OnnxCalls:
    """Calls over the caches of texts and sources, and the buffers of logits and features that they share."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        packed: PackedGraph | None,
        trees: TreeGraphs | None,
        cache: KvCache,
        sources: OnnxSources | None,
        states: SlotStates | None,
        num_layers: int,
        limits: EngineLimits,
    ) -> None:
        self._session, self._packed, self._trees = session, packed, trees
        self._cache, self._sources, self._limits = cache, sources, limits
        self._states = states
        self._num_layers = num_layers
        self._calls: dict[tuple[int, bool, PackedShape], Call] = {}
        self._calls_of_states: dict[tuple[int, Columns, PackedShape], PaddedCall] = {}
        self._logits = zeros((MIN_SPAN, limits.vocab_size))
        # What a head reads and what it recycles, by token; of any other model nothing.
        self._features = zeros((2, 0, limits.reads_features))
        self._memory = None if packed is None else PackedMemory(packed, limits, least_rows=1)

    def pad_single_rows(self) -> None:
        """Have packed rows, and wanted ones, be at least two."""
        self.clear()
        if self._packed is not None:
            self._memory = PackedMemory(self._packed, self._limits, least_rows=MIN_SPAN)

    def clear(self) -> None:
        """Forget all calls, whose memory is about to go."""
        self._calls.clear()
        self._calls_of_states.clear()

    def of(self, slot: int, sizes: PackedShape, *, is_tree: bool) -> Call:
        """The call of a shape from a slot on, for the capacities of now."""
        key = slot, is_tree, sizes
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            call = self._bound(slot, sizes, is_tree=is_tree)
            self._calls[key] = call
        return call

    def with_states(self, slot: int, sizes: PackedShape, columns: Columns) -> PaddedCall:
        """The call of a model with recurrent layers, whose scans have so many columns."""
        key = slot, columns, sizes
        call = self._calls_of_states.get(key)
        if call is None:
            if len(self._calls_of_states) >= _MAX_CALLS:
                self._calls_of_states.clear()
            call = self._padded_call(slot, sizes, None, columns)
            self._calls_of_states[key] = call
        return call

    def room(self, num_rows: int, num_wanted: int) -> FloatArray:
        """Where the answer of a call that packs rows would be: [num_rows, num_wanted, V] float32, of any content."""
        assert self._memory is not None
        if self._memory.reserve(PackedShape(num_rows, 1, num_wanted, 0, 0)):
            self._calls.clear()
        return self._memory.rectangle(num_rows, num_wanted)

    def _bound(self, slot: int, sizes: PackedShape, *, is_tree: bool) -> Call:
        memory = self._memory
        if memory is None or is_tree:
            return self._padded_call(slot, sizes, self._trees if is_tree else None)
        if memory.reserve(sizes):
            self._calls.clear()

        def bind(inputs: Mapping[str, IntArray | FloatArray], logits: FloatArray) -> Run:
            binding = self._bind(self._session, slot, sizes.num_rows, inputs, logits)
            return partial(self._session.run_with_iobinding, binding)

        return PackedCall(memory, sizes, self._cache.capacity, bind)

    def _padded_call(
        self,
        slot: int,
        sizes: PackedShape,
        trees: TreeGraphs | None,
        columns: Columns | None = None,
    ) -> PaddedCall:
        self._reserve(sizes)
        session = self._session if trees is None else trees.session
        num_rows, num_tokens, num_wanted, _, _ = sizes
        inputs = {
            TOKENS: np.zeros((num_rows, num_tokens), dtype=np.int64),
            START: np.zeros(num_rows, dtype=np.int64),
            LOGIT_POSITIONS: np.zeros((num_rows, num_wanted), dtype=np.int64),
        }
        logits = self._logits[: num_rows * num_wanted].reshape(num_rows, num_wanted, -1)
        arrays: dict[str, IntArray | FloatArray] = dict(inputs)
        features = recycled = None
        if self._limits.reads_features:
            features, recycled = (
                one[: num_rows * num_tokens].reshape(num_rows, num_tokens, -1)
                for one in self._features
            )
            arrays[FEATURES] = features
        binding = self._bind(session, slot, num_rows, arrays, logits)
        if recycled is not None:
            binding.bind_output(
                RECYCLED, "cpu", 0, np.float32, recycled.shape, recycled.ctypes.data
            )
        places = None
        if self._states is not None and columns is not None:
            places = self._states.bind(binding, slot, num_rows, num_tokens, columns)
        return PaddedCall(
            run=partial(session.run_with_iobinding, binding),
            num_tokens=num_tokens,
            tokens=int64_view(inputs[TOKENS]),
            start=int64_view(inputs[START]),
            logit_positions=int64_view(inputs[LOGIT_POSITIONS]),
            logits=logits,
            last_position=self._limits.max_context - 1,
            tree=None if trees is None else trees.bind(binding, num_rows, num_tokens),
            places=places,
            features=features,
            recycled=recycled,
        )

    def _bind(
        self,
        session: onnxruntime.InferenceSession,
        slot: int,
        num_rows: int,
        inputs: Mapping[str, IntArray | FloatArray],
        logits: FloatArray,
    ) -> onnxruntime.IOBinding:
        """Bind arrays, which the caller keeps, and the caches of slots."""
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bind_caches(binding, self._cache, self._num_layers, slot=slot, num_rows=num_rows)
        if self._sources is not None:
            self._sources.bind(binding, slot=slot, num_rows=num_rows)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return binding

    def _reserve(self, sizes: PackedShape) -> None:
        """Make the buffers of logits and features large enough for a call that packs no rows."""
        num_logits = sizes.num_rows * sizes.num_wanted
        if num_logits > len(self._logits):
            self.clear()
            self._logits = zeros((num_logits, self._limits.vocab_size))
        num_tokens = sizes.num_rows * sizes.num_tokens
        if self._limits.reads_features and num_tokens > self._features.shape[1]:
            self.clear()
            self._features = zeros((2, num_tokens, self._limits.reads_features))
