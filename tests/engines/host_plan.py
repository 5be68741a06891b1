"""Plans that run on the host: the very graphs TensorRT is given, on ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engines.base import EngineLimits
from engines.bundle import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    ModelEntry,
    key_name,
    load_bundle,
    new_key_name,
    new_value_name,
    value_name,
)
from engines.kv_cache import cache_names
from engines.onnx_session import open_session
from engines.plan_device import ALIGNMENT, HostDevice
from engines.plan_engine import PlanEngine
from engines.plans import PlanEntry, Shape, derive_profiles
from export.tensorrt_graph import derive_graph

GAMMA = 8


class HostPlan:
    """A derived graph with the profiles of a plan, over memory given by address."""

    def __init__(self, graph: Path, model: ModelEntry, entry: PlanEntry) -> None:
        self.entry = entry
        self.shapes: list[tuple[str, Shape]] = []
        self._model = model
        self._session = open_session(graph)

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Run the graph at once; refuses what a plan would refuse."""
        assert not self.entry.profiles[profile].broken_limits(shape)
        assert all(pointer % ALIGNMENT == 0 for pointer in addresses.values())
        self.shapes.append((self.entry.profiles[profile].name, shape))
        model, kind = self._model, np.dtype(self.entry.precision)
        layers = model.num_layers
        rows = (shape.batch, model.num_kv_heads, self.entry.capacity, model.head_size)
        past = cache_names(layers, key_name, value_name)
        present = cache_names(layers, new_key_name, new_value_name)
        inputs = {
            TOKENS: ((shape.batch, shape.tokens), np.int64),
            START: ((shape.batch,), np.int64),
            LOGIT_POSITIONS: ((shape.batch, shape.wanted), np.int64),
        } | dict.fromkeys(past, (rows, kind))
        outputs = dict.fromkeys(present, (rows, kind))
        outputs[LOGITS] = ((shape.batch, shape.wanted, model.vocab_size), np.float32)
        assert addresses.keys() == inputs.keys() | outputs.keys()
        binding = self._session.io_binding()
        for name, (dims, dtype) in inputs.items():
            binding.bind_input(name, "cpu", 0, dtype, dims, addresses[name])
        for name, (dims, dtype) in outputs.items():
            binding.bind_output(name, "cpu", 0, dtype, dims, addresses[name])
        self._session.run_with_iobinding(binding)

    def close(self) -> None:
        """Nothing is held."""


def write_graphs(root: Path, folder: Path, precision: str, capacities: tuple[int, ...]) -> None:
    """Derive the target's graph of a bundle, one file per capacity."""
    bundle = load_bundle(root)
    for capacity in capacities:
        out = folder / f"{precision}-{capacity}.onnx"
        derive_graph(
            bundle.model_path(bundle.manifest.target), out, capacity=capacity, precision=precision
        )


def open_host_engine(
    root: Path,
    folder: Path,
    precision: str,
    capacities: tuple[int, ...],
    row_sizes: tuple[int, ...] = (),
) -> tuple[PlanEngine, list[HostPlan], HostDevice]:
    """Engine over ``write_graphs``'s files with 3 slots, its plans and its device."""
    bundle = load_bundle(root)
    manifest = bundle.manifest
    limits = EngineLimits(
        max_batch=3,
        max_context=manifest.max_context,
        max_extend=manifest.max_extend,
        vocab_size=manifest.target.vocab_size,
    )
    profiles = derive_profiles(
        max_batch=3, max_extend=manifest.max_extend, max_gamma=GAMMA, gamma=4
    )
    plans = [
        HostPlan(
            folder / f"{precision}-{capacity}.onnx",
            manifest.target,
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
    engine = PlanEngine(plans, device, manifest.target, limits, row_sizes=row_sizes)
    return engine, plans, device
