"""Models on ONNX Runtime's CPU provider; ``engines.onnx_plan`` has the others.

The cache's memory is bound both as the graph's past and as its present, so that a step writes its
few new keys and values in place. What a call costs beside the graph is Python, so everything that
depends on shapes only (an ``OnnxCall``) is built once per shape and kept.

Bits: products of one row may take other kernels than products of many. Attention's are per row, and
the graph sees to them (``ModelEntry.narrowest_span``), or else every call has two columns. Whether
those with weights do is found out when a model is opened (``engines.single_rows``); if so, a row
alone is padded to two. Above that ONNX Runtime's CPU kernels give a row the same bits whatever is
beside it (I2), since the export admits no operator that rounds by an element's place in
its tensor (``export.to_onnx``), and in all graphs: causal (``model.onnx``), the same with shared
cache heads read once (``grouped.onnx``, run instead where the bundle has it) and masked
(``tree.onnx``, run only where a row is a tree).

Limit of I1: within one span a token whose own values are not finite spoils its slot's earlier
columns too (masked positions weigh 0, and 0 times NaN is NaN). Other slots stay sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import onnxruntime

from engines.base import BundleError, EngineError, EngineLimits, FloatArray, Span
from engines.bundle import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    Bundle,
    ModelEntry,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from engines.huge_pages import HugePages
from engines.kv_cache import MIN_SPAN, KvCache, cache_names, zeros
from engines.onnx_call import OnnxCall
from engines.onnx_session import LIBRARY_ERRORS, check_graph, open_session
from engines.onnx_tree import TreeGraphs
from engines.place_inputs import PLACE_INPUTS, PlaceInputs
from engines.single_rows import have_single_rows_same_bits
from engines.small_arrays import elements
from engines.spans import check_kept_path, check_move, check_spans, num_valid

# Logits of a call over all its rows.
_MIN_WANTED = 2
# A server sees few decode and verify shapes but many prefill tails; beyond this many the kept
# calls are dropped and built anew.
_MAX_CALLS = 512


class OnnxEngine:
    """One model of a bundle with its KV cache.

    Args:
        bundle: a verified bundle (``load_bundle``), so that the graph's weights are its own.
        entry: which of its models.
        num_threads: of the pool that all sessions of the process share; two pools that spin on
            the same cores run speculation at 0.8x of plain decoding instead of 1.9x.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the tree graphs too, if there are any; the weights are in memory twice.

    Raises:
        BundleError: a graph does not fit its entry.
        EngineError: the library cannot load it, or the shared pool has another size already.
    """

    def __init__(
        self,
        bundle: Bundle,
        entry: ModelEntry,
        *,
        num_threads: int = 2,
        max_batch: int | None = None,
        with_trees: bool = False,
    ) -> None:
        manifest = bundle.manifest
        if max_batch is not None and not 1 <= max_batch <= manifest.max_batch:
            raise BundleError(f"max_batch {max_batch}: the bundle allows 1..{manifest.max_batch}")
        self._limits = EngineLimits(
            max_batch=max_batch or manifest.max_batch,
            max_context=manifest.max_context,
            max_extend=manifest.max_extend,
            vocab_size=entry.vocab_size,
            max_tree_nodes=entry.max_tree_nodes if with_trees else 0,
        )
        huge_pages = HugePages()
        path = bundle.host_path(entry)
        self._session: onnxruntime.InferenceSession | None = open_session(
            path, num_threads=num_threads
        )
        inputs = {tensor.name for tensor in self._session.get_inputs()}
        self._is_told_places = not inputs.isdisjoint(PLACE_INPUTS)
        extra = PLACE_INPUTS if self._is_told_places else frozenset()
        check_graph(self._session, entry, file=path.name, extra_inputs=extra)
        self._narrowest_span = entry.narrowest_span
        self._trees: TreeGraphs | None = None
        if self._limits.max_tree_nodes:
            self._trees = TreeGraphs(bundle, entry, num_threads=num_threads)
        self._tree_spans: dict[int, Span] = {}
        self._cache = KvCache(
            num_layers=entry.num_layers,
            num_kv_heads=entry.num_kv_heads,
            head_size=entry.head_size,
            limits=self._limits,
        )
        self._past_names = cache_names(entry.num_layers, key_name, value_name)
        self._present_names = cache_names(entry.num_layers, new_key_name, new_value_name)
        self._calls: dict[tuple[int, int, int, int, bool], OnnxCall] = {}
        self._logits = zeros((_MIN_WANTED * entry.vocab_size,))
        self._pads_single_row = False
        self._pads_single_row = self._narrowest_span == MIN_SPAN or not have_single_rows_same_bits(
            self.extend, self._cache, self._limits
        )
        self._calls.clear()
        huge_pages.use()

    @property
    def limits(self) -> EngineLimits:
        """Capacities of this engine."""
        return self._limits

    @property
    def is_row_invariant(self) -> bool:
        """Whether I2 holds: measured for the CPU's kernels of every operator that the export admits."""
        return True

    @property
    def packs_rows(self) -> bool:
        """False: a call is a rectangle."""
        return False

    @property
    def capacity(self) -> int:
        """S, tokens a slot of the cache has room for at present."""
        return self._cache.capacity

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32 on the host, valid until the next extend; padding columns repeat a
            column of the same row.

        Raises:
            EngineError: a span breaks a limit (nothing was computed), or ONNX Runtime failed (the
                given slots are undefined and must be extended from ``start`` 0).
        """
        self._require_open()
        cache = self._cache
        longest, most_wanted = check_spans(spans, self._limits, cache.lengths)
        is_tree, furthest = False, 0
        for span in spans:
            is_tree = is_tree or span.parents is not None
            furthest = max(furthest, span.start)
        is_padded = len(spans) == 1 and self._pads_single_row
        least = MIN_SPAN if is_padded or is_tree else self._narrowest_span
        num_tokens = max(least, longest)
        num_wanted = max(_MIN_WANTED if is_padded else 1, most_wanted)
        if cache.reserve(furthest + num_tokens):
            self._calls.clear()
        call = self._call((spans[0].slot, len(spans), num_tokens, num_wanted, is_tree))
        for row, span in enumerate(spans):
            call.fill_row(row, span)
            cache.begin_write(span.slot, span.start, num_tokens)
            if self._tree_spans:
                self._tree_spans.pop(span.slot, None)
        try:
            call.run()
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error
        for span in spans:
            cache.lengths[span.slot] = num_valid(span)
            if span.parents is not None:
                self._tree_spans[span.slot] = span
        return call.logits

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the slot's last span, a tree; see ``Engine.keep_path``.

        Raises:
            EngineError: there is no such path (nothing changed), or ONNX Runtime failed (the slot
                is undefined and must be extended from ``start`` 0).
        """
        self._require_open()
        tree = self._tree_spans.get(slot)
        check_kept_path(path, slot, tree)
        assert tree is not None
        assert self._trees is not None
        del self._tree_spans[slot]
        self._cache.lengths[slot] = 0
        self._trees.keep_path(self._cache, slot, tree.start, path)
        self._cache.lengths[slot] = tree.start + len(path)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` cached tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens.
        """
        self._require_open()
        check_move(source, destination, length, self._cache.lengths)
        self._cache.move(source, destination, length)
        self._tree_spans.pop(destination, None)

    def trim(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[s]`` tokens of each slot s; see ``Engine.trim``."""
        self._require_open()
        self._tree_spans.clear()
        if self._cache.trim(lengths):
            self._calls.clear()

    def close(self) -> None:
        """Free the session and the cache; a later call raises EngineError."""
        self._session = self._trees = None
        self._calls.clear()
        del self._cache

    def _require_open(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            raise EngineError("this engine is closed")
        return self._session

    def _call(self, shape: tuple[int, int, int, int, bool]) -> OnnxCall:
        """The kept call of a shape (first slot, B, T, R, has a tree), for the capacity of now."""
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            call = self._build_call(*shape)
            self._calls[shape] = call
        return call

    def _build_call(
        self, slot: int, num_rows: int, num_tokens: int, num_wanted: int, is_tree: bool
    ) -> OnnxCall:
        logits_shape = (num_rows, num_wanted, self._limits.vocab_size)
        self._reserve_logits(math.prod(logits_shape))
        trees = self._trees if is_tree else None
        session = self._require_open() if trees is None else trees.session
        binding = session.io_binding()
        places = None
        if self._is_told_places and trees is None:
            places = PlaceInputs.empty(
                num_rows,
                num_tokens,
                capacity=self._cache.capacity,
                last_position=self._limits.max_context - 1,
            )
        inputs = {
            TOKENS: np.zeros((num_rows, num_tokens), dtype=np.int64),
            START: np.zeros(num_rows, dtype=np.int64),
            LOGIT_POSITIONS: np.zeros((num_rows, num_wanted), dtype=np.int64),
        }
        call = OnnxCall(
            run=partial(session.run_with_iobinding, binding),
            num_tokens=num_tokens,
            tokens=elements(inputs[TOKENS]),
            start=elements(inputs[START]),
            logit_positions=elements(inputs[LOGIT_POSITIONS]),
            logits=self._logits[: math.prod(logits_shape)].reshape(logits_shape),
            wanted=[None] * num_rows,
            last_position=self._limits.max_context - 1,
            tree=None if trees is None else trees.bind(binding, num_rows, num_tokens),
            places=places,
        )
        for name, array in {**inputs, **({} if places is None else places.feeds())}.items():
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        rows = self._cache.slots_shape(num_rows)
        pointers = self._cache.pointers(slot)
        for past, present, pointer in zip(
            self._past_names, self._present_names, pointers, strict=True
        ):
            binding.bind_input(past, "cpu", 0, np.float32, rows, pointer)
            binding.bind_output(present, "cpu", 0, np.float32, rows, pointer)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits_shape, call.logits.ctypes.data)
        return call

    def _reserve_logits(self, num_values: int) -> None:
        """Make the one buffer of logits, shared by all calls, large enough."""
        if num_values > self._logits.size:
            self._calls.clear()
            self._logits = zeros((num_values,))
