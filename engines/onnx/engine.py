"""Models on ONNX Runtime's CPU provider; the add-on ``engines.accelerators`` has the others.

The cache's memory is bound both as the graph's past and as its present, so that a step writes its
few new keys and values in place. What a call costs beside the graph is Python, so everything that
depends on shapes only (a ``Call``) is built once per shape and kept.

Bits: products of one row may take other kernels than products of many. Attention's are per row, and the graph sees to
them (``ModelEntry.narrowest_span``), or else every call has two columns. Products with weights are tested when a model
is opened (``engines.onnx.batch_invariance``); where they differ, a row alone is padded to two. Where rows are packed
(``engines.onnx.packed_inputs``), that is all the padding that weights multiply. From two rows on, ONNX Runtime's CPU
kernels give a row the same bits whatever is beside it (I2): the export admits no operator that rounds by an element's
place in its tensor (``export.graph.to_onnx``).

Of a model with an encoder, ``encode.onnx`` reads sources first (``engines.onnx.sources``), and the graphs below attend
to what it wrote.

Of a model with recurrent layers a slot keeps more than keys and values (``engines.onnx.states``), and ``model.onnx``
runs alone: rows are padded, and there are no trees. Layers with a window may keep rings (``engines.onnx.rings``); there
are no trees either.

Graphs: ``model.onnx`` is causal. ``grouped.onnx`` packs rows and reads shared cache heads once; it runs instead where
the bundle has it, or else ``rings.onnx``, which is ``model.onnx`` over rings. ``tree.onnx`` is masked: beside packed
rows it runs the trees alone, else every batch with a tree in it. All three give a row the same bits.

Limit of I1: within one span a token whose own values are not finite spoils its slot's earlier
columns too (masked positions weigh 0, and 0 times NaN is NaN). Other slots stay sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import onnxruntime
from outrider.engines.base import (
    BundleError,
    EngineError,
    EngineLimits,
    FloatArray,
    SlotState,
    Source,
    Span,
)
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import GROUPED_FILE
from outrider.engines.kv_cache import MIN_SPAN, KvCache, capacities
from outrider.engines.onnx.batch_invariance import is_batch_invariant
from outrider.engines.onnx.calls import Call, OnnxCalls, PaddedCall
from outrider.engines.onnx.packed_inputs import PackedGraph, PackedShape
from outrider.engines.onnx.rings import SlotRings
from outrider.engines.onnx.session import LIBRARY_ERRORS, check_graph, open_session
from outrider.engines.onnx.short_texts import LEAST_WIDE, ShortTexts
from outrider.engines.onnx.sources import OnnxSources
from outrider.engines.onnx.states import SlotStates
from outrider.engines.onnx.trees import TreeGraphs
from outrider.engines.spans import (
    NO_ENCODER,
    NO_STATES,
    check_have_sources,
    check_kept_path,
    check_move,
    check_open,
    check_read,
    check_spans,
    check_state_read,
    check_state_write,
    check_write,
    floor_without_state,
    num_valid,
)

_FLOAT_BYTES = 4
# Spans of a fourth of the longest's tokens or less do not share its call, where that is wide. (Machine E, two
# threads, three rows of a token beside 64 of a prompt, in one call and in two: SmolLM2 behind 100 tokens 197 ms and
# 180, behind 3,000 779 and 407; a 1.5B in 4 bits behind 100 tokens 1.67 s and 1.55, behind 1,000 2.29 and 1.85.)
_WIDE = 4
# Logits of a call over all its rows.
_MIN_WANTED = 2


class OnnxEngine:
    """One model of a bundle with its KV cache, and with its encoder where it has one.

    Args:
        bundle: a verified bundle (``load_bundle``), so that the graph's weights are its own.
        entry: which of its models.
        num_threads: of the pool that all sessions of the process share; two pools that spin on
            the same cores run speculation at 0.8x of plain decoding instead of 1.9x.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the tree graphs too, if there are any; the weights are in memory twice.
        beside: the target's engine, whose encoder answers for this model's where the bundle says so.

    Raises:
        BundleError: a graph does not fit its entry.
        EngineError: the library cannot load it, or the shared pool has another size already.
    """

    # I2 was measured for the CPU's kernels of every operator that the export admits.
    is_row_invariant = True

    def __init__(
        self,
        bundle: Bundle,
        entry: ModelEntry,
        *,
        num_threads: int = 0,
        max_batch: int | None = None,
        with_trees: bool = False,
        beside: OnnxEngine | None = None,
    ) -> None:
        self.limits = bundle.limits(entry, max_batch, with_trees=with_trees)
        path = bundle.host_path(entry)
        session = open_session(path, num_threads=num_threads)
        self._session: onnxruntime.InferenceSession | None = session
        self._packed = _packed_graph(self._session, entry, path, self.limits)
        extra = frozenset() if self._packed is None else self._packed.extra_inputs
        check_graph(self._session, entry, file=path.name, extra_inputs=extra)
        # Packed rows share cache heads, so that attention has two rows of a single token.
        self._narrowest_span = entry.narrowest_span if self._packed is None else 1
        self._trees: TreeGraphs | None = None
        if self.limits.max_tree_nodes:
            self._trees = TreeGraphs(bundle, entry, num_threads=num_threads)
        self._tree_spans: dict[int, Span] = {}
        self._recycled: dict[int, FloatArray] = {}
        self._cache = KvCache(
            heads=entry.heads,
            num_slots=self.limits.max_batch,
            capacities=capacities(self.limits),
            rings=entry.ring_columns,
        )
        self._states = _states_of(entry, self.limits)
        self._kept = SlotRings(entry.rings, self._cache) if entry.rings else self._states
        self.token_bytes = _FLOAT_BYTES * math.prod(self._cache.token_shape)
        self._sources: OnnxSources | None = None
        if entry.source is not None:
            shares = beside is not None and entry.source.shares_encoder
            self._sources = OnnxSources(
                bundle,
                entry,
                entry.source,
                self.limits,
                num_threads=num_threads,
                encoder=beside._require_encoder() if beside and shares else None,
            )
        self._calls = self._calls_over(self._cache, entry)
        self._short = self._short_texts(entry)
        self._pads_single_row = False
        self._pads_single_row = self._narrowest_span == MIN_SPAN or not self._is_batch_invariant()
        self._calls.clear()
        if self._pads_single_row:
            self._calls.pad_single_rows()
            if self._short is not None:
                self._short.calls.pad_single_rows()

    @property
    def packs_rows(self) -> bool:
        """Whether rows of a batch lie one behind the other, so that weights multiply no padding."""
        return self._packed is not None

    @property
    def capacity(self) -> int:
        """S, tokens a slot of the cache has room for at present."""
        return self._cache.capacity

    @property
    def source_capacity(self) -> int:
        """Tokens of a source a slot has room for at present; 0 of a model without an encoder."""
        return 0 if self._sources is None else self._sources.capacity

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources; see ``Engine.read``.

        Raises:
            EngineError: the model has no encoder, or a source breaks a limit (nothing was computed), or ONNX Runtime
                failed (the given slots have no source, and no text).
        """
        encoder = self._require_encoder()
        num_tokens = encoder.check(sources)
        for source in sources:
            self._forget_text(source.slot)
        if encoder.make_room(sources, num_tokens):
            self._calls.clear()
        encoder.read(sources, num_tokens)

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Copy a slot's source to other slots; see ``Engine.share_source``.

        Raises:
            EngineError: a slot is outside the engine, or this one has no source.
        """
        encoder = self._require_encoder()
        encoder.check_share(slot, destinations)
        for destination in destinations:
            self._forget_text(destination)
            encoder.move(slot, destination)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32 on the host, valid until the next extend; padding columns hold anything.

        Raises:
            EngineError: a span breaks a limit (nothing was computed), or ONNX Runtime failed (the
                given slots are undefined and must be extended from ``start`` 0).
        """
        self._require_open()
        cache = self._cache
        longest, most_wanted = check_spans(spans, self.limits, cache.lengths)
        if self._sources is not None:
            check_have_sources(spans, self._sources.lengths)
        if self._kept is not None:
            check_open(spans, self.limits.max_open or 0, self._kept.bases)
        has_trees, furthest = False, 0
        for span in spans:
            has_trees = has_trees or span.parents is not None
            furthest = max(furthest, span.start)
        if cache.reserve(furthest + max(MIN_SPAN, longest)):
            self._calls.clear()
        try:
            if has_trees and self._packed is not None:
                logits = self._run_apart(spans, most_wanted)
            elif has_trees or self._kept is not None:
                logits = self._run(spans, most_wanted, is_tree=has_trees)
            else:
                logits = self._run_chains(spans, most_wanted)
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error
        for span in spans:
            cache.lengths[span.slot] = num_valid(span)
            if self._tree_spans:
                self._tree_spans.pop(span.slot, None)
            if span.parents is not None:
                self._tree_spans[span.slot] = span
        return logits

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the slot's last span, a tree; see ``Engine.keep_path``.

        Raises:
            EngineError: there is no such path (nothing changed), or ONNX Runtime failed (the slot
                is undefined and must be extended from ``start`` 0).
        """
        self._require_open()
        tree = check_kept_path(path, slot, self._tree_spans.get(slot))
        assert self._trees is not None
        del self._tree_spans[slot]
        self._cache.lengths[slot] = 0
        self._trees.keep_path(self._cache, slot, tree.start, path)
        self._cache.lengths[slot] = tree.start + len(path)

    def features(self, slot: int, start: int, end: int) -> FloatArray:
        """Return [end - start, F] float32, features of a slot's tokens; zeros of those that it does not hold.

        ``F`` is ``ModelEntry.gives_features``.
        """
        self._require_open()
        num_held = max(0, min(end, self._cache.lengths[slot]) - start)
        keys, values = self._cache.layer(-1, slot, start, start + num_held)
        found = np.zeros((end - start, 2 * keys.shape[2]), np.float32)
        found[:num_held] = np.concatenate([keys[0], values[0]], axis=-1)
        return found

    def recycled(self, slot: int) -> FloatArray:
        """Return [F] float32 of the last token that a head was given for a slot in its last extend."""
        return self._recycled.get(slot, np.zeros(self.limits.reads_features, np.float32))

    def first_start(self, slot: int) -> int:
        """Return the settled tokens of a slot of a model with states or rings; see ``Engine.first_start``."""
        return 0 if self._kept is None else self._kept.bases[slot]

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the source and the first ``length`` cached tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens or has settled more.
        """
        self._require_open()
        check_move(source, destination, length, self._cache.lengths, self.first_start(source))
        self._cache.move(source, destination, length)
        if self._kept is not None:
            self._kept.move(source, destination, length)
        if self._sources is not None:
            self._sources.move(source, destination)
        self._tree_spans.pop(destination, None)

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Return [..., end - start, D] float32, a copy of the slot's keys and values; see ``Engine.read_slot``.

        Raises:
            EngineError: a slot is outside the engine, or holds fewer tokens.
        """
        self._require_open()
        check_read(slot, start, end, self._cache.lengths)
        return self._cache.read(slot, end, start)

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Put keys and values into a slot behind its first ``start`` tokens; see ``Engine.write_slot``.

        Raises:
            EngineError: a slot is outside the engine, has no room or holds fewer tokens, the values are no such, or
                more memory could not be had.
        """
        self._require_open()
        cache = self._cache
        count = check_write(slot, start, values, cache.token_shape, self.limits, cache.lengths)
        if cache.reserve(start + count):
            self._calls.clear()
        cache.write(slot, start, values)
        self._tree_spans.pop(slot, None)
        if self._kept is not None:
            self._kept.bases[slot] = floor_without_state(self.limits)

    @property
    def state_bytes(self) -> int:
        """Bytes of what ``read_state`` returns at most; 0 without states and rings."""
        kept, longest = self._kept, self.limits.max_context
        return 0 if kept is None else _FLOAT_BYTES * kept.size(longest)

    def read_state(self, slot: int) -> SlotState:
        """Return a copy of a slot's state; see ``Engine.read_state``.

        Raises:
            EngineError: the slot has settled nothing, or the model has neither recurrent layers nor rings.
        """
        kept = self._require_kept()
        check_state_read(slot, self._cache.lengths, kept.bases)
        return SlotState(length=kept.bases[slot], values=kept.read(slot))

    def write_state(self, slot: int, state: SlotState) -> None:
        """Give a slot the state of the text that was written to it; see ``Engine.write_state``.

        Raises:
            EngineError: the state is of another text or engine, or the model has neither recurrent layers nor rings.
        """
        kept = self._require_kept()
        held = self._cache.lengths, kept.bases
        check_state_write(slot, state, kept.size(state.length), self.limits, held)
        kept.write(slot, state.length, state.values)

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first ``lengths[s]`` tokens of each slot s; see ``Engine.trim``."""
        self._require_open()
        self._tree_spans.clear()
        if self._kept is not None:
            lengths = self._kept.trimmed(lengths)
        try:
            if self._cache.trim(lengths):
                self._calls.clear()
            if self._short is not None:
                self._short.trim()
        finally:
            if self._sources is not None and self._sources.trim(lengths):
                self._calls.clear()

    def close(self) -> None:
        """Free sessions and caches; a later call raises EngineError."""
        self._session = self._trees = self._sources = self._short = None
        del self._calls, self._cache

    def _run(self, spans: Sequence[Span], num_wanted: int, *, is_tree: bool) -> FloatArray:
        """Run spans in one call, which there is room for in the cache; ``is_tree`` is needed where one is a tree.

        Returns:
            [B, R, V] float32, R at least ``num_wanted``.
        """
        longest = all_tokens = all_wanted = 0
        for span in spans:
            num_tokens = len(span.tokens)
            longest = max(longest, num_tokens)
            all_tokens += num_tokens
            all_wanted += span.num_logits
        is_padded = len(spans) == 1 and self._pads_single_row
        if self._packed is not None and not is_tree:
            num_tokens, num_wanted = max(self._packed.least_tokens, longest), max(1, num_wanted)
        else:
            num_tokens = max(MIN_SPAN if is_padded or is_tree else self._narrowest_span, longest)
            num_wanted = max(_MIN_WANTED if is_padded else 1, num_wanted)
            # Padding is rows like others.
            all_tokens, all_wanted = len(spans) * num_tokens, len(spans) * num_wanted
        sizes = PackedShape(len(spans), num_tokens, num_wanted, all_tokens, all_wanted)
        states, slot = self._states, spans[0].slot
        call: Call
        short = self._short
        if short is not None and (is_tree or not short.takes(spans, num_tokens)):
            short = None
        if short is not None:
            call = short.call(spans[0], sizes)
        elif states is None:
            call = self._calls.of(slot, sizes, is_tree=is_tree)
        else:
            call = self._calls.with_states(slot, sizes, states.columns(spans))
            assert call.places is not None
            states.begin(spans, call.places)
        call.fill(spans)
        for span in spans:
            self._cache.begin_write(span.slot, span.start, num_tokens)
        call.run()
        if short is not None:
            short.put_back(spans[0], num_tokens)
        if isinstance(call, PaddedCall) and call.recycled is not None:
            for row, span in enumerate(spans):
                if span.tokens:
                    self._recycled[span.slot] = call.recycled[row, len(span.tokens) - 1].copy()
        if self._kept is not None:
            self._kept.commit(spans)
        return call.answer(spans)

    def _run_chains(self, spans: Sequence[Span], most_wanted: int) -> FloatArray:
        """Run spans without trees in one call, or wide ones in calls of their own beside the rest.

        Attention computes the rectangle of a call, and where rows are not packed, all of the graph does: a token
        beside a chunk costs as much as the chunk's. A pass over the weights costs less than that.

        Returns:
            [B, R, V] float32, R at least ``most_wanted``.
        """
        longest = max(len(span.tokens) for span in spans)
        if longest < LEAST_WIDE:
            return self._run(spans, most_wanted, is_tree=False)
        is_wide = [_WIDE * len(span.tokens) > longest for span in spans]
        if all(is_wide):
            return self._run(spans, most_wanted, is_tree=False)
        first = spans[0].slot
        narrow = [
            _without_tokens(span) if wide else span
            for span, wide in zip(spans, is_wide, strict=True)
        ]
        calls = [narrow] if any(span.tokens for span in narrow) else []
        for wide, neighbours in groupby(spans, key=lambda span: is_wide[span.slot - first]):
            if wide:
                calls.append(list(neighbours))
        shape = len(spans), max(1, most_wanted), self.limits.vocab_size
        logits = np.empty(shape, np.float32)  # a call's answer lasts until the next
        for rows in calls:
            wanted = max(span.num_logits for span in rows)
            at = rows[0].slot - first
            found = self._run(rows, wanted, is_tree=False)
            logits[at : at + len(rows), :wanted] = found[:, :wanted]
        return logits

    def _run_apart(self, spans: Sequence[Span], most_wanted: int) -> FloatArray:
        """Run all chains in one call that packs rows, then neighbouring trees in calls of their own.

        In one call with trees, weights would multiply every chain as often as the largest tree has nodes. A tree is
        no more than a row without tokens to the chains' call; what that writes, the tree's call overwrites or zeroes.

        Returns:
            [B, R, V] float32, R = ``most_wanted``.
        """
        chains = [span if span.parents is None else _without_tokens(span) for span in spans]
        if any(span.tokens for span in chains):
            logits = self._run_chains(chains, most_wanted)
        else:
            logits = self._calls.room(len(spans), max(1, most_wanted))
        for is_tree, run in groupby(spans, key=lambda span: span.parents is not None):
            if is_tree:
                trees = list(run)
                wanted = max(span.num_logits for span in trees)
                first = trees[0].slot - spans[0].slot
                found = self._run(trees, wanted, is_tree=True)
                logits[first : first + len(trees), :wanted] = found[:, :wanted]
        return logits

    def _is_batch_invariant(self) -> bool:
        """Test it with slot 0, whose source and floor are gone afterwards."""
        if self._sources is None:
            kept_of = None if self._kept is None else self._kept.kept_of
            found = is_batch_invariant(self.extend, self._cache, self.limits, kept_of)
            if self._kept is not None:
                self._kept.trimmed([])
            return found
        self.read([Source(slot=0, tokens=(0, 0, 0)[: self.limits.max_source])])
        try:
            return is_batch_invariant(self.extend, self._cache, self.limits)
        finally:
            self._sources.trim([])

    def _calls_over(self, cache: KvCache, entry: ModelEntry) -> OnnxCalls:
        return OnnxCalls(
            self._require_open(),
            packed=self._packed,
            trees=self._trees,
            cache=cache,
            sources=self._sources,
            states=self._states,
            num_layers=entry.num_layers,
            limits=self.limits,
        )

    def _short_texts(self, entry: ModelEntry) -> ShortTexts | None:
        """Return what wide calls of short texts go to; None where slots keep more than caches, or there is only one."""
        if self._kept is not None or self._sources is not None or self.limits.max_batch == 1:
            return None
        sizes = capacities(self.limits)
        own = KvCache(heads=entry.heads, num_slots=1, capacities=sizes)
        return ShortTexts(self._cache, own, self._calls_over(own, entry))

    def _forget_text(self, slot: int) -> None:
        self._cache.lengths[slot] = 0
        self._tree_spans.pop(slot, None)

    def _require_encoder(self) -> OnnxSources:
        self._require_open()
        if self._sources is None:
            raise EngineError(NO_ENCODER)
        return self._sources

    def _require_kept(self) -> SlotStates | SlotRings:
        """Return what sets floors to texts: recurrent layers or rings, of which no model has both."""
        self._require_open()
        if self._kept is None:
            raise EngineError(NO_STATES)
        return self._kept

    def _require_open(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            raise EngineError("this engine is closed")
        return self._session


def _without_tokens(span: Span) -> Span:
    """Return what stands for a span in a call that does not compute it: what is written there is overwritten."""
    return Span(slot=span.slot, start=span.start, tokens=(), num_logits=0)


def _states_of(entry: ModelEntry, limits: EngineLimits) -> SlotStates | None:
    """Return what slots keep of a model's recurrent layers; None where it has none."""
    return None if entry.states is None else SlotStates(entry.states, limits.max_batch)


def _packed_graph(
    session: onnxruntime.InferenceSession, entry: ModelEntry, path: Path, limits: EngineLimits
) -> PackedGraph | None:
    """Return the inputs that a graph with packed rows takes; None for the canonical graph.

    Raises:
        BundleError: the graph shares cache heads but packs no rows, as before outrider could.
    """
    packed = PackedGraph.of(
        {tensor.name: tensor.shape for tensor in session.get_inputs()},
        num_kv_heads=entry.num_kv_heads,
        last=limits.max_context - 1,
    )
    if packed is None and path.name == GROUPED_FILE:
        raise BundleError(
            f"{entry.path}/{path.name}: of an earlier outrider, which packed no rows; export again"
        )
    return packed
