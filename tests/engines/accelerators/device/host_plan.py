"""Plans that run on the host: the very graphs TensorRT is given, on ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from outrider.engines.accelerators.device.base import ALIGNMENT, HostDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.tree_plans import keep_profile, tree_profile
from outrider.engines.accelerators.device.trees import PlanTrees
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import (
    ANCESTORS,
    COLUMNS,
    LOGIT_POSITIONS,
    LOGITS,
    POSITIONS,
    START,
    TOKENS,
    past_names,
    present_names,
)
from outrider.engines.bundle.plans import PlanEntry, Profile, Shape, derive_profiles
from outrider.engines.onnx.session import open_session
from outrider.export.accelerators.tensorrt.graph import derive_graph
from outrider.export.accelerators.tensorrt.trees import derive_keep_graph, derive_tree_graph

GAMMA = 8


class HostPlan:
    """A derived graph with the profiles of a plan, over memory given by address."""

    is_by_token = False

    def __init__(self, graph: Path, model: ModelEntry, entry: PlanEntry) -> None:
        self.entry = entry
        self.shapes: list[tuple[str, Shape]] = []
        self._model = model
        self._session = open_session(graph)
        self.inputs = {tensor.name for tensor in self._session.get_inputs()}

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Run the graph at once; refuses what a plan would refuse."""
        assert not self.entry.profiles[profile].broken_limits(shape)
        assert all(pointer % ALIGNMENT == 0 for pointer in addresses.values())
        self.shapes.append((self.entry.profiles[profile].name, shape))
        model, kind = self._model, np.dtype(self.entry.precision)
        layers = model.num_layers
        rows = (shape.batch, model.num_kv_heads, self.entry.capacity, model.head_size)
        caches = past_names(layers) + present_names(layers)
        kinds = {
            TOKENS: ((shape.batch, shape.tokens), np.int64),
            START: ((shape.batch,), np.int64),
            LOGIT_POSITIONS: ((shape.batch, shape.wanted), np.int64),
            POSITIONS: ((shape.batch, shape.tokens), np.int64),
            ANCESTORS: ((shape.batch, shape.tokens, shape.tokens), np.bool_),
            COLUMNS: ((shape.tokens,), np.int64),
            LOGITS: ((shape.batch, shape.wanted, model.vocab_size), np.float32),
        } | dict.fromkeys(caches, (rows, kind))
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        assert addresses.keys() == {tensor.name for tensor in (*inputs, *outputs)}
        binding = self._session.io_binding()
        for tensors, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for name in (tensor.name for tensor in tensors):
                dims, dtype = kinds[name]
                bind(name, "cpu", 0, dtype, dims, addresses[name])
        self._session.run_with_iobinding(binding)

    def close(self) -> None:
        """Nothing is held."""


def write_graphs(root: Path, folder: Path, precision: str, capacities: tuple[int, ...]) -> None:
    """Derive the target's graphs of a bundle, one file per kind and capacity."""
    bundle = load_bundle(root)
    target = bundle.manifest.target
    sources = {
        "chain": (derive_graph, bundle.model_path(target)),
        "tree": (derive_tree_graph, bundle.model_path(target)),
        "keep": (derive_keep_graph, bundle.keep_path_path(target)),
    }
    for capacity in capacities:
        for kind, (derive, source) in sources.items():
            out = folder / f"{kind}-{precision}-{capacity}.onnx"
            derive(source, out, capacity=capacity, precision=precision)


def open_host_engine(
    root: Path,
    folder: Path,
    precision: str,
    capacities: tuple[int, ...],
    row_sizes: tuple[int, ...] = (),
    *,
    with_trees: bool = False,
) -> tuple[PlanEngine, list[HostPlan], HostDevice]:
    """Engine over ``write_graphs``'s files with 3 slots, its plans for chains and its device."""
    bundle = load_bundle(root)
    manifest = bundle.manifest
    target = manifest.target
    limits = bundle.limits(target, 3, with_trees=with_trees)

    def plans_of(kind: str, *profiles: Profile) -> list[HostPlan]:
        return [
            HostPlan(
                folder / f"{kind}-{precision}-{capacity}.onnx",
                target,
                PlanEntry(
                    path="",
                    part="target",
                    flavour="host",
                    version="",
                    compute_capability="",
                    precision=precision,
                    capacity=capacity,
                    profiles=profiles,
                ),
            )
            for capacity in capacities
        ]

    device = HostDevice()
    trees = None
    if with_trees:
        trees = PlanTrees(
            plans_of("tree", tree_profile(manifest, target)),
            plans_of("keep", keep_profile(target)),
            device,
            last_position=limits.max_context - 1,
        )
    profiles = derive_profiles(
        max_batch=3, max_extend=manifest.max_extend, max_gamma=GAMMA, gamma=4
    )
    plans = plans_of("chain", *profiles)
    engine = PlanEngine(plans, device, target, limits, row_sizes=row_sizes, trees=trees)
    return engine, plans, device
