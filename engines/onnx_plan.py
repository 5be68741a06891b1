"""Canonical graphs on ONNX Runtime as plans: over memory of a device, on that device's one stream.

The very graphs of ``engines.onnx_engine``. There a call's arrays lie on the host; here everything is
on the device when the graph is enqueued, and nothing waits. So the provider of a GPU runs behind
``engines.plan_engine`` as TensorRT does, and on the CPU's provider the same code can be tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.base import BundleError, EngineLimits
from engines.bound_session import BoundSession
from engines.bundle import ANCESTORS, POSITIONS, TREE_FILE, Bundle, ModelEntry
from engines.kv_cache import MIN_SPAN, capacities
from engines.onnx_session import check_graph, open_session, records_graphs
from engines.plan_device import PlanDevice
from engines.plan_engine import PlanEngine
from engines.plan_tensors import ModelTensors
from engines.plan_trees import PlanTrees
from engines.plans import MAX_STEP_TOKENS, PlanEntry, Profile, Range, Shape, plan_capacities
from engines.row_buckets import row_sizes
from engines.tree_plans import keep_profile, tree_profile

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
    with_trees: bool = False,
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
        with_trees: load the graphs that take trees too, if there are any; their weights are on the
            device twice.
        provider_options: of a GPU's provider, as ``open_session`` takes them.

    Raises:
        BundleError: the graph does not fit its entry, or ``max_batch`` the bundle.
        EngineError: the library cannot load it.
    """
    manifest = bundle.manifest
    if max_batch is not None and not 1 <= max_batch <= manifest.max_batch:
        raise BundleError(f"max_batch {max_batch}: the bundle allows 1..{manifest.max_batch}")
    limits = EngineLimits(
        max_batch=max_batch or manifest.max_batch,
        max_context=manifest.max_context,
        max_extend=manifest.max_extend,
        vocab_size=model.vocab_size,
        max_tree_nodes=model.max_tree_nodes if with_trees else 0,
    )
    options = provider_options or {}
    opener = _Opener(bundle, model, device, limits, num_threads, options)
    is_row_invariant = device.kind == "cpu"
    return PlanEngine(
        opener.chains(is_row_invariant),
        device,
        model,
        limits,
        is_row_invariant=is_row_invariant,
        owns_device=owns_device,
        row_sizes=row_sizes(limits.max_batch) if records_graphs(options) else (),
        trees=opener.trees() if limits.max_tree_nodes else None,
    )


class _Opener:
    """Loads the graphs of one model as plans of every capacity, each graph once."""

    def __init__(
        self,
        bundle: Bundle,
        model: ModelEntry,
        device: PlanDevice,
        limits: EngineLimits,
        num_threads: int,
        provider_options: Mapping[str, str],
    ) -> None:
        self._bundle, self._model, self._device, self._limits = bundle, model, device, limits
        self._records = records_graphs(provider_options)
        self._options: Any = {
            "device": device.kind,
            "device_index": device.index,
            "num_threads": num_threads,
            "stream": device.stream,
            "provider_options": provider_options,
        }

    def chains(self, is_row_invariant: bool) -> list[OnnxPlan]:
        """Plans of the canonical graph."""
        session = open_session(self._bundle.model_path(self._model), **self._options)
        check_graph(session, self._model)
        max_recorded = max(MAX_STEP_TOKENS, self._bundle.manifest.max_gamma + 1)
        return self._plans(session, _any_shape(self._limits, is_row_invariant), max_recorded)

    def trees(self) -> PlanTrees:
        """Plans of the graphs that take trees."""
        session = open_session(self._bundle.tree_path(self._model), **self._options)
        extra = {POSITIONS, ANCESTORS}
        check_graph(session, self._model, file=TREE_FILE, extra_inputs=extra)
        keeper = open_session(self._bundle.keep_path_path(self._model), **self._options)
        profile = tree_profile(self._bundle.manifest, self._model)
        return PlanTrees(
            self._plans(session, profile, self._limits.max_tree_nodes),
            self._plans(keeper, keep_profile(self._model), 0),
            self._device,
            self._model,
            last_position=self._limits.max_context - 1,
        )

    def _plans(self, session: Any, profile: Profile, max_recorded: int) -> list[OnnxPlan]:
        bound = BoundSession(session, self._device, records=self._records)
        return [
            OnnxPlan(bound, self._model, _entry(profile, capacity), max_recorded=max_recorded)
            for capacity in plan_capacities(capacities(self._limits))
        ]


def _any_shape(limits: EngineLimits, is_row_invariant: bool) -> Profile:
    """Every shape of chains that the limits allow."""
    least = MIN_SPAN if is_row_invariant else 1
    tokens = Range(least, least, max(least, limits.max_extend))
    return Profile(name=_ANY, batch=Range(1, 1, limits.max_batch), tokens=tokens, wanted=tokens)


def _entry(profile: Profile, capacity: int) -> PlanEntry:
    """What the manifest would say of a plan for these shapes."""
    return PlanEntry(
        path="",
        part=_ANY,
        flavour=_ANY,
        version="",
        compute_capability="",
        precision="float32",
        capacity=capacity,
        profiles=(profile,),
    )
