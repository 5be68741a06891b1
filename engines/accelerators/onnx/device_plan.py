"""Canonical graphs on ONNX Runtime as plans: over memory of a device, on that device's one stream.

In ``engines.onnx.engine`` a call's arrays lie on the host; here everything is on the device when the graph is
enqueued, and nothing waits. So the provider of a GPU runs behind ``accelerators.device.engine`` as TensorRT does, over
``device.onnx`` and its like. On the CPU's provider the same code runs the host's own graphs, with the host's bits, or
the device's in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.padding import row_sizes
from outrider.engines.accelerators.device.sources import PlanSources, read_profile
from outrider.engines.accelerators.device.tensors import ModelTensors
from outrider.engines.accelerators.device.tree_plans import keep_profile, tree_profile
from outrider.engines.accelerators.device.trees import PlanTrees
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import BundleError, EngineLimits
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import DEVICE_ENCODE_FILE, ENCODE_FILE
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import (
    ANCESTORS,
    DEVICE_FILE,
    DEVICE_KEEP_PATH_FILE,
    DEVICE_TREE_FILE,
    KEEP_PATH_FILE,
    LENGTHS,
    MODEL_FILE,
    POSITIONS,
    TREE_FILE,
)
from outrider.engines.bundle.plans import (
    MAX_STEP_TOKENS,
    PlanEntry,
    Profile,
    Range,
    Shape,
    plan_capacities,
    source_capacity,
)
from outrider.engines.devices import CPU
from outrider.engines.kv_cache import MIN_SPAN, coarse_capacities
from outrider.engines.onnx.session import (
    check_encode_graph,
    check_graph,
    open_session,
    records_graphs,
)

_ANY = "any"
_FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Files of a model's graphs, the inputs that those for chains and trees have more, and their type."""

    chains: str
    trees: str
    keep_path: str
    encode: str
    extra_inputs: frozenset[str]
    precision: str


_OF_HOST = _Graphs(MODEL_FILE, TREE_FILE, KEEP_PATH_FILE, ENCODE_FILE, frozenset(), _FLOAT32)


class OnnxPlan:
    """A session with caches of one capacity; see ``engines.accelerators.device.plan.LoadedPlan``.

    Runs of spans of at most ``max_recorded`` tokens may be recorded as CUDA graphs.
    """

    def __init__(
        self, session: BoundSession, model: ModelEntry, entry: PlanEntry, *, max_recorded: int
    ) -> None:
        self.entry = entry
        self._session = session
        self.is_by_token = session.is_by_token
        self._tensors = ModelTensors(model, entry, is_by_token=self.is_by_token)
        self._max_recorded = max_recorded

    @property
    def inputs(self) -> Set[str]:
        """Names of the tensors that the graph reads."""
        return self._session.inputs

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
    num_threads: int = 0,
    max_batch: int | None = None,
    owns_device: bool = False,
    with_trees: bool = False,
    runs_device_graphs: bool | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> PlanEngine:
    """Engine of a bundle's model over a device.

    The host's graphs pad spans as ``OnnxEngine`` does, so that they have its bits. With trees the weights are on
    the device twice. Where ``runs_device_graphs`` is None, an accelerator does. A draft that shares the target's
    encoder has it on the device for itself too.

    Raises:
        BundleError: the graph does not fit its entry, there is none for accelerators, or ``max_batch``
            does not fit the bundle.
        EngineError: the library cannot load it.
    """
    is_host = device.kind == CPU if runs_device_graphs is None else not runs_device_graphs
    graphs = _OF_HOST if is_host else _device_graphs(bundle, model, device)
    limits = bundle.limits(model, max_batch, with_trees=with_trees)
    options = provider_options or {}
    opener = _Opener(
        bundle=bundle,
        model=model,
        device=device,
        limits=limits,
        graphs=graphs,
        records=device.kind != CPU and records_graphs(options),
        options={
            "device": device.kind,
            "device_index": device.index,
            "num_threads": num_threads,
            "stream": device.stream,
            "provider_options": options,
        },
    )
    return PlanEngine(
        opener.chains(is_row_invariant=is_host),
        device,
        model,
        limits,
        is_row_invariant=is_host,
        owns_device=owns_device,
        row_sizes=row_sizes(limits.max_batch) if opener.records else (),
        trees=opener.trees() if limits.max_tree_nodes else None,
        sources=opener.sources(),
    )


def _device_graphs(bundle: Bundle, model: ModelEntry, device: PlanDevice) -> _Graphs:
    if reason := bundle.why_no_device(model, device.compute_capability):
        raise BundleError(reason)
    files = (DEVICE_FILE, DEVICE_TREE_FILE, DEVICE_KEEP_PATH_FILE, DEVICE_ENCODE_FILE)
    return _Graphs(*files, frozenset({LENGTHS}), model.device_precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opener:
    """Loads the graphs of one model as plans of every capacity, each graph once.

    ``options`` are those of ``open_session``; ``records`` says whether runs are recorded as CUDA graphs.
    """

    bundle: Bundle
    model: ModelEntry
    device: PlanDevice
    limits: EngineLimits
    graphs: _Graphs
    records: bool
    options: Any

    def chains(self, *, is_row_invariant: bool) -> list[OnnxPlan]:
        """Plans of the graph that takes chains."""
        session = self._open(self.graphs.chains)
        extra = self.graphs.extra_inputs
        check_graph(
            session, self.model, file=self.graphs.chains, extra_inputs=extra, may_be_by_token=True
        )
        max_recorded = max(MAX_STEP_TOKENS, self.bundle.manifest.max_gamma + 1)
        return self._plans(
            session, self.graphs.chains, _any_shape(self.limits, is_row_invariant), max_recorded
        )

    def trees(self) -> PlanTrees:
        """Plans of the graphs that take trees."""
        session = self._open(self.graphs.trees)
        extra = {POSITIONS, ANCESTORS, *self.graphs.extra_inputs}
        check_graph(
            session, self.model, file=self.graphs.trees, extra_inputs=extra, may_be_by_token=True
        )
        keeper = self._open(self.graphs.keep_path)
        profile = tree_profile(self.bundle.manifest, self.model)
        return PlanTrees(
            self._plans(session, self.graphs.trees, profile, self.limits.max_tree_nodes),
            self._plans(keeper, self.graphs.keep_path, keep_profile(self.model), 0),
            self.device,
            last_position=self.limits.max_context - 1,
        )

    def sources(self) -> PlanSources | None:
        """The plan of the graph that reads sources, with their cache; None for a model without an encoder."""
        source = self.model.source
        if source is None:
            return None
        session = self._open(self.graphs.encode)
        check_encode_graph(session, self.model, source, file=self.graphs.encode)
        profile = read_profile(source, max_batch=self.limits.max_batch)
        entry = _entry(profile, self.graphs.precision, source_capacity(source.max_source))
        bound = BoundSession(session, self.device)
        plan = OnnxPlan(bound, self.model, entry, max_recorded=0)
        return PlanSources(plan, self.device, self.model, source, self.limits)

    def _open(self, file: str) -> Any:
        path = self.bundle.model_path(self.model).with_name(file)
        return open_session(path, **self.options)

    def _plans(
        self, session: Any, name: str, profile: Profile, max_recorded: int
    ) -> list[OnnxPlan]:
        bound = BoundSession(session, self.device, name=name, records=self.records)
        entries = [
            _entry(profile, self.graphs.precision, capacity)
            for capacity in plan_capacities(coarse_capacities(self.limits))
        ]
        return [OnnxPlan(bound, self.model, entry, max_recorded=max_recorded) for entry in entries]


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
