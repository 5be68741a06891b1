"""The calls of a model on the CPU: bound once per shape and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import onnxruntime

from engines.base import EngineLimits, FloatArray, IntArray
from engines.bundle import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from engines.kv_cache import MIN_SPAN, KvCache, cache_names, zeros
from engines.onnx_call import Call, PackedCall, PaddedCall
from engines.onnx_tree import TreeGraphs
from engines.packed_inputs import PackedGraph, PackedInputs, PackedShape
from engines.small_arrays import elements

# A server sees few decode and verify shapes but many prefill tails and ragged batches; beyond this many the kept
# calls are dropped and built anew.
_MAX_CALLS = 512


class OnnxCalls:
    """Calls over one cache, and the one buffer of logits that they share.

    Args:
        session: over the graph of chains.
        packed: what that graph asks for where it packs its rows, else None.
        trees: for calls in which some row is a tree, if there are any.
        cache: of the model.
        num_layers: L.
        limits: of the engine.

    Attributes:
        least_rows: packed rows, and wanted ones, are at least so many.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        packed: PackedGraph | None,
        trees: TreeGraphs | None,
        cache: KvCache,
        num_layers: int,
        limits: EngineLimits,
    ) -> None:
        self._session, self._packed, self._trees = session, packed, trees
        self._cache, self._limits = cache, limits
        self._past_names = cache_names(num_layers, key_name, value_name)
        self._present_names = cache_names(num_layers, new_key_name, new_value_name)
        self._calls: dict[tuple[int, bool, PackedShape], Call] = {}
        self._logits = zeros((MIN_SPAN * limits.vocab_size,))
        self.least_rows = 1

    def clear(self) -> None:
        """Forget all calls, whose memory is about to go."""
        self._calls.clear()

    def sizes(self) -> list[PackedShape]:
        """Of the calls that are kept."""
        return [sizes for _, _, sizes in self._calls]

    def of(self, slot: int, sizes: PackedShape, *, is_tree: bool) -> Call:
        """The call of a shape from a slot on, for the capacity of now."""
        key = slot, is_tree, sizes
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._reserve_logits(sizes)
            call = self._calls[key] = self._bound(slot, sizes, is_tree=is_tree)
        return call

    def _bound(self, slot: int, sizes: PackedShape, *, is_tree: bool) -> Call:
        if self._packed is None or is_tree:
            return self._padded_call(slot, sizes, self._trees if is_tree else None)
        return self._packed_call(self._packed, slot, sizes)

    def _packed_call(self, graph: PackedGraph, slot: int, sizes: PackedShape) -> PackedCall:
        binding = self._session.io_binding()
        inputs = PackedInputs(
            graph, sizes, capacity=self._cache.capacity, least_rows=self.least_rows
        )
        self._bind(binding, slot, sizes.num_rows, inputs.arrays)
        wanted = (1, inputs.arrays[LOGIT_POSITIONS].size, self._limits.vocab_size)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, wanted, self._logits.ctypes.data)
        return PackedCall(
            run=partial(self._session.run_with_iobinding, binding),
            inputs=inputs,
            logits=self._logits_of(sizes),
            is_even=sizes.is_even,
        )

    def _padded_call(self, slot: int, sizes: PackedShape, trees: TreeGraphs | None) -> PaddedCall:
        session = self._session if trees is None else trees.session
        binding = session.io_binding()
        num_rows, num_tokens, num_wanted, _, _ = sizes
        inputs = {
            TOKENS: np.zeros((num_rows, num_tokens), dtype=np.int64),
            START: np.zeros(num_rows, dtype=np.int64),
            LOGIT_POSITIONS: np.zeros((num_rows, num_wanted), dtype=np.int64),
        }
        self._bind(binding, slot, num_rows, inputs)
        logits = self._logits_of(sizes)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return PaddedCall(
            run=partial(session.run_with_iobinding, binding),
            num_tokens=num_tokens,
            tokens=elements(inputs[TOKENS]),
            start=elements(inputs[START]),
            logit_positions=elements(inputs[LOGIT_POSITIONS]),
            logits=logits,
            wanted=[None] * num_rows,
            last_position=self._limits.max_context - 1,
            tree=None if trees is None else trees.bind(binding, num_rows, num_tokens),
        )

    def _bind(
        self,
        binding: onnxruntime.IOBinding,
        slot: int,
        num_rows: int,
        inputs: Mapping[str, IntArray | FloatArray],
    ) -> None:
        """Bind a call's inputs and the caches of its slots."""
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        rows = self._cache.slots_shape(num_rows)
        pointers = self._cache.pointers(slot)
        for past, present, pointer in zip(
            self._past_names, self._present_names, pointers, strict=True
        ):
            binding.bind_input(past, "cpu", 0, np.float32, rows, pointer)
            binding.bind_output(present, "cpu", 0, np.float32, rows, pointer)

    def _logits_of(self, sizes: PackedShape) -> FloatArray:
        """[B, R, V] at the beginning of the one buffer of logits."""
        shape = (sizes.num_rows, sizes.num_wanted, self._limits.vocab_size)
        return self._logits[: math.prod(shape)].reshape(shape)

    def _reserve_logits(self, sizes: PackedShape) -> None:
        """Make the buffer of logits large enough."""
        rows = max(sizes.num_rows * sizes.num_wanted, self.least_rows)
        num_values = rows * self._limits.vocab_size
        if num_values > self._logits.size:
            self._calls.clear()
            self._logits = zeros((num_values,))
