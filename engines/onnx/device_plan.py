"""Canonical graphs on ONNX Runtime as plans: over memory of a device, on that device's one stream.

The very graphs of ``engines.onnx.engine``, and where weights are float16 one that computes so too. There
a call's arrays lie on the host; here everything is on the device when the graph is enqueued, and
nothing waits. So the provider of a GPU runs behind
``engines.device.engine`` as TensorRT does, and on the CPU's provider the same code can be tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engines.base import BundleError, EngineLimits
from outrider.engines.bundle.manifest import (
    ANCESTORS,
    HALF_FILE,
    MODEL_FILE,
    POSITIONS,
    TREE_FILE,
    Bundle,
    ModelEntry,
)
from outrider.engines.bundle.plans import (
    MAX_STEP_TOKENS,
    PlanEntry,
    Profile,
    Range,
    Shape,
    plan_capacities,
)
from outrider.engines.device.base import PlanDevice
from outrider.engines.device.engine import PlanEngine, row_sizes
from outrider.engines.device.tensors import ModelTensors
from outrider.engines.device.tree_plans import keep_profile, tree_profile
from outrider.engines.device.trees import PlanTrees
from outrider.engines.kv_cache import MIN_SPAN, coarse_capacities
from outrider.engines.onnx.bound_session import BoundSession
from outrider.engines.onnx.session import check_graph, open_session, records_graphs

_ANY = "any"
_FLOAT32, _FLOAT16 = "float32", "float16"


class OnnxPlan:
    """A session with caches of one capacity; see ``engines.device.plan.LoadedPlan``.

    Runs of spans of at most ``max_recorded`` tokens may be recorded as CUDA graphs.
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
    computes_in_halves: bool | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> PlanEngine:
    """Engine of a bundle's model over a device.

    In float32 spans are padded on the CPU's provider as ``OnnxEngine`` pads them, so that they have its
    bits. A model with float16 weights has a graph that computes in float16; it takes chains alone.

    With trees the weights are on the device twice. Where ``computes_in_halves`` is None, an accelerator does.

    Raises:
        BundleError: the graph does not fit its entry, there is none in halves, or ``max_batch`` does
            not fit the bundle.
        EngineError: the library cannot load it.
    """
    in_halves = _picks_halves(bundle, model, device, computes_in_halves)
    limits = bundle.limits(model, max_batch, with_trees=with_trees and not in_halves)
    options = provider_options or {}
    opener = _Opener(bundle, model, device, limits, num_threads, options)
    is_row_invariant = device.kind == "cpu" and not in_halves
    return PlanEngine(
        opener.chains(is_row_invariant, in_halves=in_halves),
        device,
        model,
        limits,
        is_row_invariant=is_row_invariant,
        owns_device=owns_device,
        row_sizes=row_sizes(limits.max_batch) if records_graphs(options) else (),
        trees=opener.trees() if limits.max_tree_nodes else None,
    )


def _picks_halves(
    bundle: Bundle, model: ModelEntry, device: PlanDevice, asked: bool | None
) -> bool:
    has_halves = bundle.half_path(model) is not None
    if asked and not has_halves:
        raise BundleError(f"{model.path}: no {HALF_FILE}; export with --weights float16")
    return has_halves and device.kind != "cpu" if asked is None else asked


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

    def chains(self, is_row_invariant: bool, *, in_halves: bool) -> list[OnnxPlan]:
        """Plans of the canonical graph, or of that which computes in float16."""
        file, precision = (HALF_FILE, _FLOAT16) if in_halves else (MODEL_FILE, _FLOAT32)
        path = self._bundle.model_path(self._model).with_name(file)
        session = open_session(path, **self._options)
        check_graph(session, self._model, file=file)
        max_recorded = max(MAX_STEP_TOKENS, self._bundle.manifest.max_gamma + 1)
        profile = _any_shape(self._limits, is_row_invariant)
        return self._plans(session, profile, max_recorded, precision)

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
            last_position=self._limits.max_context - 1,
        )

    def _plans(
        self, session: Any, profile: Profile, max_recorded: int, precision: str = _FLOAT32
    ) -> list[OnnxPlan]:
        bound = BoundSession(session, self._device, records=self._records)
        entries = [
            _entry(profile, precision, capacity)
            for capacity in plan_capacities(coarse_capacities(self._limits))
        ]
        return [OnnxPlan(bound, self._model, entry, max_recorded=max_recorded) for entry in entries]


def _any_shape(limits: EngineLimits, is_row_invariant: bool) -> Profile:
    """Every shape of chains that the limits allow."""
    least = MIN_SPAN if is_row_invariant else 1
    tokens = Range(least, least, max(least, limits.max_extend))
    return Profile(name=_ANY, batch=Range(1, 1, limits.max_batch), tokens=tokens, wanted=tokens)


def _entry(profile: Profile, precision: str, capacity: int) -> PlanEntry:
    """Return the entry that a manifest would have for these shapes."""
    return PlanEntry(
        path="",
        part=_ANY,
        flavour=_ANY,
        version="",
        compute_capability="",
        precision=precision,
        capacity=capacity,
        profiles=(profile,),
    )
