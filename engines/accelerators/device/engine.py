"""The engine contract over plans: which plan and profile runs, over which memory.

Knows neither TensorRT nor CUDA: a ``LoadedPlan`` runs, a ``PlanDevice`` holds the bytes. So the same
code serves from TensorRT plans on a GPU and, in the tests, from the plans' own graphs on the host.

An extend is one upload (tokens, starts and wanted positions in one piece), one run, one download of
the logits and one wait. A graph reads its inputs at one place whatever was uploaded when: a run of the
same shape over the same rows is the same run, and what was recorded of it stays good. Rows that no
profile holds together run one by one. ``extend_on_device`` is the same without the download and the
wait, so that several follow one another on the device. A call in which a row is a tree runs a plan of
its own (``trees``), and so does a read of sources (``sources``), which all calls then attend to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.accelerators.device.base import DeviceTensor, PlanDevice
from outrider.engines.accelerators.device.kv_cache import PlanCache
from outrider.engines.accelerators.device.padding import padding_rows
from outrider.engines.accelerators.device.plan import LoadedPlan
from outrider.engines.accelerators.device.sources import PlanSources
from outrider.engines.accelerators.device.tensors import CACHE_DTYPES, cache_heads, feeds_of
from outrider.engines.accelerators.device.transfers import (
    DeviceTokens,
    Downloads,
    HostArray,
    InputPlace,
    OutputPlace,
    Uploads,
)
from outrider.engines.accelerators.device.trees import PlanTrees, has_tree
from outrider.engines.base import (
    BundleError,
    EngineError,
    EngineLimits,
    FloatArray,
    Source,
    Span,
)
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import LENGTHS, LOGITS, TOKENS, past_names, present_names
from outrider.engines.bundle.plans import Shape, profile_for, rows_of_longest
from outrider.engines.devices import CPU
from outrider.engines.kv_cache import GROWTH_ROOM
from outrider.engines.spans import (
    NO_ENCODER,
    WithoutCopies,
    check_have_sources,
    check_move,
    check_spans,
    num_valid,
)

_FLOAT32 = np.dtype(np.float32)


class PlanEngine(WithoutCopies):
    """One model with its KV cache on a device.

    ``plans`` have one precision and distinct capacities. Calls are padded to ``row_sizes``, if there are any.
    ``trees`` and ``sources`` are for engines that take and read such.

    Raises:
        BundleError: no plan, none whose capacity holds every extend of the limits, or one without
            its like for trees.
    """

    # A call is a rectangle.
    packs_rows = False

    def __init__(
        self,
        plans: Sequence[LoadedPlan],
        device: PlanDevice,
        model: ModelEntry,
        limits: EngineLimits,
        *,
        is_row_invariant: bool = False,
        owns_device: bool = True,
        row_sizes: Sequence[int] = (),
        trees: PlanTrees | None = None,
        sources: PlanSources | None = None,
    ) -> None:
        self._plans = sorted(plans, key=lambda plan: plan.entry.capacity)
        self._trees, self._sources = trees, sources
        wanted = limits.max_context + limits.max_extend
        if not self._plans or self._plans[-1].entry.capacity < wanted:
            raise BundleError(f"no plan with a cache of {wanted} tokens; build the plans again")
        if trees is not None:
            trees.check_capacities([plan.entry.capacity for plan in self._plans])
        # Of the plans' weights and products.
        self.precision = self._plans[0].entry.precision
        self._device = device
        rows = min(rows_of_longest(plan.entry.profiles) for plan in self._plans)
        self.limits = replace(limits, max_prompt_rows=min(rows, limits.max_batch))
        heads, size = cache_heads(model, is_by_token=self._plans[0].is_by_token)
        self._cache: PlanCache | None = PlanCache(
            device,
            past_names(model.num_layers),
            present_names(model.num_layers),
            num_heads=heads,
            head_size=size,
            max_batch=limits.max_batch,
            item_bytes=CACHE_DTYPES[self.precision].itemsize,
            capacity=self._plans[0].entry.capacity,
            # An H200 gave equal bits with NaN beyond lengths; a tree's kernel masks, and the host's answers NaN.
            reads_lengths=device.kind != CPU and LENGTHS in self._plans[0].inputs and trees is None,
        )
        self.is_row_invariant = is_row_invariant
        self._owns_device = owns_device
        self._row_sizes = row_sizes
        self._uploads = Uploads(device)
        self._inputs = InputPlace(device)
        self._downloads = Downloads(device)
        # Logits that nobody wants must not overwrite those that somebody may still read.
        self._logits, self._unread = OutputPlace(device), OutputPlace(device)

    @property
    def capacity(self) -> int:
        """S, tokens a slot of the cache has room for at present."""
        return self._require_open().capacity

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources; see ``Engine.read``.

        Raises:
            EngineError: the model has no encoder, or a source breaks a limit (nothing was computed), or the library
                failed (the given slots have no source, and no text).
        """
        encoder = self._require_encoder()
        num_tokens = encoder.check(sources)
        for source in sources:
            self._forget_text(source.slot)
        encoder.read(sources, num_tokens)

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Copy a slot's source to other slots; see ``Engine.share_source``.

        Raises:
            EngineError: the model has no encoder, a slot is outside the engine, or this one has no source.
        """
        encoder = self._require_encoder()
        encoder.check_share(slot, destinations)
        for destination in destinations:
            self._forget_text(destination)
            encoder.move(slot, destination)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32 on the host, valid until the next extend; later columns are padding.
            Where no logits are wanted nothing is copied, and nothing is waited for.

        Raises:
            EngineError: a span breaks a limit (nothing was computed), or the library failed (the
                given slots are undefined and must be extended from ``start`` 0).
        """
        shape = self._shape(spans)
        profiles = self._plan(spans).entry.profiles
        if any(not profile.broken_limits(shape) for profile in profiles):
            return self._on_host(self._run(spans, shape), spans)
        logits = np.zeros((*shape[::2], self.limits.vocab_size), dtype=np.float32)
        for row, span in enumerate(spans):
            alone = self._padded([span], len(span.tokens), span.num_logits)
            found = self._on_host(self._run([span], alone), [span])
            logits[row, : span.num_logits] = found[0, : span.num_logits]
        return logits

    def extend_on_device(
        self, spans: Sequence[Span], given: Sequence[DeviceTokens] = ()
    ) -> DeviceTensor:
        """Enqueue an extend whose logits stay, and some of whose tokens are, on the device.

        Args:
            spans: as for ``extend``; in place of given tokens any id may stand.
            given: tokens that replace those of the spans.

        Returns:
            [B, R, V] float32, valid until the next extend of this engine that wants logits.

        Raises:
            EngineError: as ``extend``, or no plan profile holds all rows together.
        """
        shape = self._shape(spans)
        return self._run(spans, shape, given)

    def wait(self) -> None:
        """Return when all that was enqueued on the device is done."""
        self._device.wait()

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the slot's last span, a tree; see ``Engine.keep_path``.

        Raises:
            EngineError: there is no such path (nothing changed), or the library failed (the slot is
                undefined and must be extended from ``start`` 0).
        """
        cache = self._require_open()
        if self._trees is None:
            raise EngineError(f"slot {slot}: this engine takes no trees")
        self._trees.keep_path(cache, slot, path)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the source and the first ``length`` cached tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens.
        """
        cache = self._require_open()
        check_move(source, destination, length, cache.lengths)
        cache.move(source, destination, length)
        if self._sources is not None:
            self._sources.move(source, destination)
        if self._trees is not None:
            self._trees.forget(destination)

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first ``lengths[s]`` tokens of each slot s; see ``Engine.trim``."""
        cache = self._require_open()
        if self._trees is not None:
            self._trees.forget()
        if self._sources is not None:
            self._sources.trim(lengths)
        room = GROWTH_ROOM * cache.trim(lengths)
        sizes = (plan.entry.capacity for plan in self._plans)
        capacity = next((size for size in sizes if size >= room), cache.capacity)
        if capacity < cache.capacity and not cache.reads_lengths:
            cache.resize(capacity)

    def close(self) -> None:
        """Free plans, caches and the device's memory; a later call raises EngineError."""
        if self._cache is None:
            return
        self._device.wait()
        self._cache.free()
        self._cache = None
        for plan in self._plans:
            plan.close()
        if self._trees is not None:
            self._trees.close()
        if self._sources is not None:
            self._sources.close()
        for piece in (self._uploads, self._inputs, self._downloads, self._logits, self._unread):
            piece.free()
        if self._owns_device:
            self._device.close()

    def _require_open(self) -> PlanCache:
        if self._cache is None:
            raise EngineError("this engine is closed")
        return self._cache

    def _require_encoder(self) -> PlanSources:
        self._require_open()
        if self._sources is None:
            raise EngineError(NO_ENCODER)
        return self._sources

    def _forget_text(self, slot: int) -> None:
        self._require_open().lengths[slot] = 0
        if self._trees is not None:
            self._trees.forget(slot)

    def _plan(self, spans: Sequence[Span]) -> LoadedPlan:
        capacity = self._require_open().capacity
        if self._trees is not None and has_tree(spans):
            return self._trees.plan(capacity)
        return next(plan for plan in self._plans if plan.entry.capacity == capacity)

    def _reserve(self, num_tokens: int) -> None:
        cache = self._require_open()
        if num_tokens > cache.capacity:
            sizes = (plan.entry.capacity for plan in self._plans)
            cache.resize(next(size for size in sizes if size >= num_tokens))

    def _shape(self, spans: Sequence[Span]) -> Shape:
        """Shape of spans that keep the limits, in a cache that has room for them."""
        cache = self._require_open()
        longest, most_wanted = check_spans(spans, self.limits, cache.lengths)
        if self._sources is not None:
            check_have_sources(spans, self._sources.lengths)
        shape = self._padded(spans, longest, most_wanted)
        self._reserve(max(span.start for span in spans) + shape.tokens)
        return shape

    def _padded(self, spans: Sequence[Span], num_tokens: int, num_wanted: int) -> Shape:
        """Shape with as many tokens and logits as the narrowest profile takes at least."""
        profiles = self._plan(spans).entry.profiles
        return Shape(
            len(spans),
            max(num_tokens, min(profile.tokens.least for profile in profiles)),
            max(num_wanted, min(profile.wanted.least for profile in profiles)),
        )

    def _run(
        self, spans: Sequence[Span], shape: Shape, given: Sequence[DeviceTokens] = ()
    ) -> DeviceTensor:
        """Enqueue an extend of rows that one profile holds together."""
        cache, plan = self._require_open(), self._plan(spans)
        profile = profile_for(plan.entry.profiles, shape)
        padding = padding_rows(
            spans,
            shape,
            sizes=self._row_sizes,
            lengths=cache.lengths,
            capacity=cache.capacity,
            profile=plan.entry.profiles[profile],
        )
        rows = [*spans, *padding]
        shape = shape._replace(batch=len(rows))
        arrays: dict[str, HostArray] = {
            name: array for name, array in feeds_of(rows, shape).items() if name in plan.inputs
        }
        if self._trees is not None and has_tree(spans):
            arrays |= self._trees.feeds(rows, shape)
        if self._sources is not None:
            arrays |= self._sources.feeds(rows)
        feeds = self._inputs.take(self._uploads.put(arrays))
        for tokens in given:
            tokens.write(self._device, feeds[TOKENS])
        for span in rows:
            cache.begin_write(span.slot, span.start, shape.tokens)
        for span in spans:
            cache.lengths[span.slot] = 0
        addresses = {name: tensor.pointer for name, tensor in feeds.items()}
        addresses |= cache.addresses(spans[0].slot)
        if self._sources is not None:
            addresses |= self._sources.addresses(spans[0].slot)
        row_logits = (shape.wanted, self.limits.vocab_size)
        num_bytes = shape.batch * math.prod(row_logits) * _FLOAT32.itemsize
        is_wanted = any(span.num_logits for span in spans)
        addresses[LOGITS] = (self._logits if is_wanted else self._unread).take(num_bytes)
        plan.run(profile, shape, addresses)
        for span in spans:
            cache.lengths[span.slot] = num_valid(span)
        if self._trees is not None:
            self._trees.note(spans)
        return DeviceTensor(addresses[LOGITS], (len(spans), *row_logits), _FLOAT32)

    def _on_host(self, logits: DeviceTensor, spans: Sequence[Span]) -> FloatArray:
        if not any(span.num_logits for span in spans):
            return np.zeros((logits.shape[0], 0, logits.shape[2]), dtype=np.float32)
        found: FloatArray = self._downloads.get([logits])[0]
        return found
