"""The engine contract over plans: which plan and profile runs, over which memory.

Knows neither TensorRT nor CUDA: a ``LoadedPlan`` runs, a ``PlanDevice`` holds the bytes. So the same
code serves from TensorRT plans on a GPU and, in the tests, from the plans' own graphs on the host.

An extend is one upload (tokens, starts and wanted positions in one piece), one run, one download of
the logits and one wait. Rows that no profile holds together run one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engines.base import BundleError, EngineError, EngineLimits, FloatArray, Span
from engines.bundle import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    ModelEntry,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from engines.kv_cache import GROWTH_ROOM, cache_names
from engines.plan_cache import PlanCache
from engines.plan_device import ALIGNMENT, PlanDevice, Staging
from engines.plans import PlanEntry, Shape, profile_for
from engines.spans import check_move, check_spans

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_INT64_BYTES, _FLOAT32_BYTES = 8, 4


class LoadedPlan(Protocol):
    """One plan on a device."""

    @property
    def entry(self) -> PlanEntry:
        """What the manifest says of it."""
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


class PlanEngine:
    """One model with its KV cache on a device.

    Args:
        plans: of the model, one precision, distinct capacities.
        device: where they run; closed with the engine.
        model: its entry in the manifest.
        limits: of the engine; trees are not taken.

    Raises:
        BundleError: no plan, or none whose capacity holds every extend of the limits.
    """

    is_row_invariant = False

    def __init__(
        self,
        plans: Sequence[LoadedPlan],
        device: PlanDevice,
        model: ModelEntry,
        limits: EngineLimits,
    ) -> None:
        self._plans = sorted(plans, key=lambda plan: plan.entry.capacity)
        wanted = limits.max_context + limits.max_extend
        if not self._plans or self._plans[-1].entry.capacity < wanted:
            raise BundleError(f"no plan with a cache of {wanted} tokens; build the plans again")
        self._device = device
        self._limits = limits
        self._cache: PlanCache | None = PlanCache(
            device,
            model,
            max_batch=limits.max_batch,
            item_bytes=ITEM_BYTES[self._plans[0].entry.precision],
            capacity=self._plans[0].entry.capacity,
        )
        layers = model.num_layers
        self._past_names = cache_names(layers, key_name, value_name)
        self._present_names = cache_names(layers, new_key_name, new_value_name)
        self._feeds = _Feeds(device)
        self._logits = _Logits(device)

    @property
    def limits(self) -> EngineLimits:
        """Capacities of this engine."""
        return self._limits

    @property
    def capacity(self) -> int:
        """S, tokens a slot of the cache has room for at present."""
        return self._require_open().capacity

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32 on the host, valid until the next extend; later columns are padding.

        Raises:
            EngineError: a span breaks a limit (nothing was computed), or the library failed (the
                given slots are undefined and must be extended from ``start`` 0).
        """
        cache = self._require_open()
        longest, most_wanted = check_spans(spans, self._limits, cache.lengths)
        shape = Shape(len(spans), max(1, longest), max(1, most_wanted))
        self._reserve(max(span.start for span in spans) + shape.tokens)
        profiles = self._plan().entry.profiles
        if any(not profile.broken_limits(shape) for profile in profiles):
            return self._run(spans, shape)
        logits = np.zeros((*shape[::2], self._limits.vocab_size), dtype=np.float32)
        for row, span in enumerate(spans):
            alone = Shape(1, max(1, len(span.tokens)), max(1, span.num_logits))
            logits[row, : alone.wanted] = self._run([span], alone)[0]
        return logits

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Refuse: no tree is ever extended here.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"slot {slot}: this engine takes no trees")

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` cached tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens.
        """
        cache = self._require_open()
        check_move(source, destination, length, cache.lengths)
        cache.move(source, destination, length)

    def trim(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[s]`` tokens of each slot s; see ``Engine.trim``."""
        cache = self._require_open()
        room = GROWTH_ROOM * cache.trim(lengths)
        sizes = (plan.entry.capacity for plan in self._plans)
        capacity = next((size for size in sizes if size >= room), cache.capacity)
        if capacity < cache.capacity:
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
        self._feeds.free()
        self._logits.free()
        self._device.close()

    def _require_open(self) -> PlanCache:
        if self._cache is None:
            raise EngineError("this engine is closed")
        return self._cache

    def _plan(self) -> LoadedPlan:
        capacity = self._require_open().capacity
        return next(plan for plan in self._plans if plan.entry.capacity == capacity)

    def _reserve(self, num_tokens: int) -> None:
        cache = self._require_open()
        if num_tokens > cache.capacity:
            sizes = (plan.entry.capacity for plan in self._plans)
            cache.resize(next(size for size in sizes if size >= num_tokens))

    def _run(self, spans: Sequence[Span], shape: Shape) -> FloatArray:
        """Extend rows that one profile holds together."""
        cache, plan = self._require_open(), self._plan()
        profile = profile_for(plan.entry.profiles, shape)
        addresses = self._feeds.upload(spans, shape)
        for span in spans:
            cache.begin_write(span.slot, span.start, shape.tokens)
            cache.lengths[span.slot] = 0
        pointers = cache.pointers(spans[0].slot)
        addresses |= dict(zip(self._past_names, pointers, strict=True))
        addresses |= dict(zip(self._present_names, pointers, strict=True))
        logits_shape = (shape.batch, shape.wanted, self._limits.vocab_size)
        addresses[LOGITS] = self._logits.reserve(logits_shape)
        plan.run(profile, shape, addresses)
        logits = self._logits.download(logits_shape)
        for span in spans:
            cache.lengths[span.slot] = span.start + len(span.tokens)
        return logits


class _Room:
    """One piece of device memory with its image on the host, made anew when it is too small."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._num_bytes = 0
        self._pointer = 0
        self._staging: Staging | None = None

    def make(self, num_bytes: int) -> tuple[int, Staging]:
        if self._staging is None or num_bytes > self._num_bytes:
            self.free()
            self._num_bytes = num_bytes
            self._pointer = self._device.allocate(num_bytes)
            self._staging = self._device.stage(num_bytes)
        return self._pointer, self._staging

    def free(self) -> None:
        """Give both back."""
        if self._staging is not None:
            self._device.free(self._pointer)
            self._staging.free()
            self._staging = None


class _Feeds:
    """The integers of a call, uploaded in one piece."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._room = _Room(device)

    def upload(self, spans: Sequence[Span], shape: Shape) -> dict[str, int]:
        """Enqueue tokens, starts and wanted positions; their addresses by name."""
        shapes = {
            TOKENS: (shape.batch, shape.tokens),
            START: (shape.batch,),
            LOGIT_POSITIONS: (shape.batch, shape.wanted),
        }
        offsets, total = {}, 0
        for name, dims in shapes.items():
            offsets[name] = total
            total += -(-int(np.prod(dims)) * _INT64_BYTES // ALIGNMENT) * ALIGNMENT
        pointer, staging = self._room.make(total)
        arrays = {
            name: staging.array[offsets[name] :][: int(np.prod(dims)) * _INT64_BYTES]
            .view(np.int64)
            .reshape(dims)
            for name, dims in shapes.items()
        }
        for row, span in enumerate(spans):
            num_tokens = len(span.tokens)
            # The last token and the last wanted position are repeated as padding.
            arrays[START][row] = span.start
            arrays[TOKENS][row] = span.tokens[-1] if span.tokens else 0
            arrays[TOKENS][row, :num_tokens] = span.tokens
            first = num_tokens - span.num_logits
            arrays[LOGIT_POSITIONS][row] = max(0, num_tokens - 1)
            arrays[LOGIT_POSITIONS][row, : span.num_logits] = range(first, num_tokens)
        self._device.upload(pointer, staging, total)
        return {name: pointer + offset for name, offset in offsets.items()}

    def free(self) -> None:
        """Give the memory back."""
        self._room.free()


class _Logits:
    """The logits of a call, on the device and on the host."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._room = _Room(device)

    def reserve(self, shape: tuple[int, int, int]) -> int:
        """Address of room for logits [B, R, V] float32."""
        return self._room.make(_num_bytes(shape))[0]

    def download(self, shape: tuple[int, int, int]) -> FloatArray:
        """The logits on the host, when everything enqueued is done."""
        pointer, staging = self._room.make(_num_bytes(shape))
        self._device.download(staging, pointer, _num_bytes(shape))
        self._device.wait()
        return staging.array[: _num_bytes(shape)].view(np.float32).reshape(shape)

    def free(self) -> None:
        """Give the memory back."""
        self._room.free()


def _num_bytes(shape: tuple[int, int, int]) -> int:
    return int(np.prod(shape)) * _FLOAT32_BYTES
