"""Canonical graphs on ONNX Runtime as plans: over memory of a device, on that device's one stream.

The very graphs of ``engines.onnx_engine``. There a call's arrays lie on the host; here everything is
on the device when the graph is enqueued, and nothing waits. So the provider of a GPU runs behind
``engines.plan_engine`` as TensorRT does, and on the CPU's provider the same code can be tested.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from engines.base import BundleError, EngineLimits
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
from engines.kv_cache import MIN_SPAN, cache_names, capacities
from engines.onnx_session import check_graph, enqueue, open_session
from engines.plan_device import PlanDevice
from engines.plan_engine import PlanEngine
from engines.plans import PlanEntry, Profile, Range, Shape, plan_capacities

_MAX_BINDINGS = 512
_ANY = "any"


class OnnxPlan:
    """A session with caches of one capacity; see ``engines.plan_engine.LoadedPlan``.

    Args:
        session: over the canonical graph; shared by the plans of all capacities.
        device: whose memory is bound.
        model: entry of the model.
        entry: describes the plan as a built one is described.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        device: PlanDevice,
        model: ModelEntry,
        entry: PlanEntry,
    ) -> None:
        self.entry = entry
        self._session = session
        self._place = (device.kind, device.index)
        self._model = model
        self._past_names = cache_names(model.num_layers, key_name, value_name)
        self._present_names = cache_names(model.num_layers, new_key_name, new_value_name)
        self._bindings: dict[tuple[object, ...], onnxruntime.IOBinding] = {}

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Enqueue the graph; see ``LoadedPlan.run``.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        key = (shape, *addresses.values())
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[key] = self._bind(shape, addresses)
        enqueue(self._session, binding)

    def close(self) -> None:
        """Drop what is bound."""
        self._bindings.clear()

    def _bind(self, shape: Shape, addresses: Mapping[str, int]) -> onnxruntime.IOBinding:
        model, place = self._model, self._place
        binding = self._session.io_binding()
        for name, dims in (
            (TOKENS, (shape.batch, shape.tokens)),
            (START, (shape.batch,)),
            (LOGIT_POSITIONS, (shape.batch, shape.wanted)),
        ):
            binding.bind_input(name, *place, np.int64, dims, addresses[name])
        rows = (shape.batch, model.num_kv_heads, self.entry.capacity, model.head_size)
        for name in self._past_names:
            binding.bind_input(name, *place, np.float32, rows, addresses[name])
        for name in self._present_names:
            binding.bind_output(name, *place, np.float32, rows, addresses[name])
        logits = (shape.batch, shape.wanted, model.vocab_size)
        binding.bind_output(LOGITS, *place, np.float32, logits, addresses[LOGITS])
        return binding


def open_on_device(
    bundle: Bundle,
    model: ModelEntry,
    device: PlanDevice,
    *,
    num_threads: int = 2,
    max_batch: int | None = None,
    owns_device: bool = False,
) -> PlanEngine:
    """Engine of a bundle's model over a device.

    Spans are padded on the CPU's provider as ``OnnxEngine`` pads them, so that they have its bits.

    Args:
        bundle: from ``load_bundle``.
        model: entry of the model in the manifest.
        device: its memory and stream; may be shared by several engines.
        num_threads: of the pool that all sessions of the process share.
        max_batch: slots; None for all the bundle allows.
        owns_device: whether closing the engine closes the device.

    Raises:
        BundleError: the graph does not fit its entry, or ``max_batch`` the bundle.
        EngineError: the library cannot load it.
    """
    manifest = bundle.manifest
    if max_batch is not None and not 1 <= max_batch <= manifest.max_batch:
        raise BundleError(f"max_batch {max_batch}: the bundle allows 1..{manifest.max_batch}")
    session = open_session(
        bundle.model_path(model),
        device=device.kind,
        device_index=device.index,
        num_threads=num_threads,
        stream=device.stream,
    )
    check_graph(session, model)
    limits = EngineLimits(
        max_batch=max_batch or manifest.max_batch,
        max_context=manifest.max_context,
        max_extend=manifest.max_extend,
        vocab_size=model.vocab_size,
    )
    is_row_invariant = device.kind == "cpu"
    plans = [
        OnnxPlan(session, device, model, _entry(limits, capacity, is_row_invariant))
        for capacity in plan_capacities(capacities(limits))
    ]
    return PlanEngine(
        plans, device, model, limits, is_row_invariant=is_row_invariant, owns_device=owns_device
    )


def _entry(limits: EngineLimits, capacity: int, is_row_invariant: bool) -> PlanEntry:
    """What the manifest would say of a plan that takes any shape the limits allow."""
    least = MIN_SPAN if is_row_invariant else 1
    tokens = Range(least, least, max(least, limits.max_extend))
    rows = Range(1, 1, limits.max_batch)
    return PlanEntry(
        path="",
        part=_ANY,
        flavour=_ANY,
        version="",
        compute_capability="",
        precision="float32",
        capacity=capacity,
        profiles=(Profile(name=_ANY, batch=rows, tokens=tokens, wanted=tokens),),
    )
