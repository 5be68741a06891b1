"""The sampler's graphs as TensorRT plans, over the stream and the memory that the engines share."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engines.accelerators.device.base import Call, DeviceTensor
from outrider.engines.accelerators.device.cuda import CudaDevice, compute_capability
from outrider.engines.accelerators.device.sampling.lists import LIST_LIMITS
from outrider.engines.accelerators.device.sampling.plans import check_call, sampler_parts
from outrider.engines.accelerators.device.sampling.sampler import GraphSampler, GraphSet
from outrider.engines.accelerators.device.sampling.tensors import KEPT_ROWS, NEW_KEPT_ROWS
from outrider.engines.accelerators.tensorrt.api import installed_apis
from outrider.engines.accelerators.tensorrt.engine import choose_plans, serving_api
from outrider.engines.accelerators.tensorrt.program import TensorRtProgram
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.plans import Machine, PlanEntry


class TensorRtGraph:
    """One graph's plan; see ``engines.accelerators.device.sampling.runner.SamplerGraph``."""

    def __init__(self, program: TensorRtProgram) -> None:
        self._program = program
        self.inputs = program.inputs
        self.outputs = program.outputs
        if NEW_KEPT_ROWS in self.outputs:
            program.check_aliases([(KEPT_ROWS, NEW_KEPT_ROWS)])

    def run(self, tensors: Mapping[str, DeviceTensor]) -> None:
        """Enqueue it; see ``SamplerGraph.run``."""
        check_call(self._program.entry, tensors)
        self._program.run(0, Call(tuple(tensors.items()), lambda: tensors))

    def close(self) -> None:
        """Free contexts and recordings."""
        self._program.close()


def open_tensorrt_sampler(bundle: Bundle, device: CudaDevice, *, max_batch: int) -> GraphSampler:
    """Sampler over the plans of a bundle's graphs, all loaded at once: no step waits for one.

    Raises:
        BundleError: a plan is not what the manifest says of it.
        EngineError: a graph has no plan that fits; says why for each plan.
    """
    api = serving_api(installed_apis(), bundle.manifest, device.compute_capability)
    entries = sampler_entries(bundle, api.machine(device.compute_capability))
    programs = {
        part: TensorRtProgram(api, device, bundle, entry) for part, entry in entries.items()
    }
    # One at a time runs, so all share what the greediest needs.
    num_bytes = max(program.scratch_bytes for program in programs.values())
    scratch = device.allocate(num_bytes)
    for program in programs.values():
        program.prepare(scratch, num_bytes)
    device.wait()
    graphs = {part: TensorRtGraph(program) for part, program in programs.items()}

    def open_graph(file: str) -> TensorRtGraph:
        if file not in graphs:
            raise EngineError(f"{file}: the bundle has no such sampler graph")
        return graphs[file]

    manifest = bundle.manifest
    return GraphSampler(
        GraphSet(
            open_graph=open_graph,
            draws_races=True,
            list_limits=LIST_LIMITS,
            close=lambda: device.free(scratch),
        ),
        max_batch=max_batch,
        max_gamma=manifest.max_gamma,
        vocab_size=manifest.target.vocab_size,
        device=device,
    )


def check_sampler_plans(bundle: Bundle, index: int) -> None:
    """Refuse a machine on which the plans of a bundle's sampler do not run.

    Raises:
        EngineError: no TensorRT, no such device, or a graph without a plan that fits them.
    """
    capability = compute_capability(index)
    api = serving_api(installed_apis(), bundle.manifest, capability)
    sampler_entries(bundle, api.machine(capability))


def sampler_entries(bundle: Bundle, machine: Machine) -> dict[str, PlanEntry]:
    """The plan of each sampler graph, by the graph's file name.

    Raises:
        EngineError: a graph has none that fits; says why.
    """
    manifest = bundle.manifest
    return {
        part: choose_plans(manifest.plans, part, machine)[0] for part in sampler_parts(manifest)
    }
