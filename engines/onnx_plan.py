"""Canonical graphs on ONNX Runtime as plans: over memory of a device, on that device's one stream.

The very graphs of ``engines.onnx_engine``. There a call's arrays lie on the host; here everything is
on the device when the graph is enqueued, and nothing waits. So the provider of a GPU runs behind
``engines.plan_engine`` as TensorRT does, and on the CPU's provider the same code can be tested.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.base import BundleError, EngineLimits
from engines.bound_session import BoundSession
from engines.bundle import Bundle, ModelEntry
from engines.kv_cache import MIN_SPAN, capacities
from engines.onnx_session import check_graph, open_session, records_graphs
from engines.plan_device import PlanDevice
from engines.plan_engine import PlanEngine
from engines.plan_tensors import ModelTensors
from engines.plans import MAX_STEP_TOKENS, PlanEntry, Profile, Range, Shape, plan_capacities
from engines.row_buckets import row_sizes

_ANY = "any"


class OnnxPlan:
    """A session with caches of one capacity; see ``engines.loaded_plan.LoadedPlan``.

    Args:
        session: over the canonical graph; shared by the plans of all capacities.
        model: entry of the model.
        entry: describes the plan as a built one is described.
        max_recorded: tokens of the widest span whose runs may be recorded as CUDA graphs.
    """

    def __init__(
        self, session: BoundSession, model: ModelEntry, entry: PlanEntry, *, max_recorded: int
    ) -> None:
        self.entry = entry
        self._session = session
        self._tensors = ModelTensors(model, entry)
        self._max_recorded = max_recorded

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Enqueue the graph; see ``LoadedPlan.run``.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        call = self._tensors.call(shape, addresses)
        self._session.run(call, may_record=shape.tokens <= self._max_recorded)

    def close(self) -> None:
        """Drop what is bound."""
        self._session.close()


def open_on_device(
    bundle: Bundle,
    model: ModelEntry,
    device: PlanDevice,
    *,
    num_threads: int = 2,
    max_batch: int | None = None,
    owns_device: bool = False,
    provider_options: Mapping[str, str] | None = None,
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
        provider_options: of a GPU's provider, as ``open_session`` takes them.

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
        provider_options=provider_options,
    )
    check_graph(session, model)
    limits = EngineLimits(
        max_batch=max_batch or manifest.max_batch,
        max_context=manifest.max_context,
        max_extend=manifest.max_extend,
        vocab_size=model.vocab_size,
    )
    is_row_invariant = device.kind == "cpu"
    records = records_graphs(provider_options or {})
    bound = BoundSession(session, device, records=records)
    max_recorded = max(MAX_STEP_TOKENS, manifest.max_gamma + 1)
    plans = [
        OnnxPlan(
            bound,
            model,
            _entry(limits, capacity, is_row_invariant),
            max_recorded=max_recorded,
        )
        for capacity in plan_capacities(capacities(limits))
    ]
    return PlanEngine(
        plans,
        device,
        model,
        limits,
        is_row_invariant=is_row_invariant,
        owns_device=owns_device,
        row_sizes=row_sizes(limits.max_batch) if records else (),
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
