"""TensorRT plans of a bundle on a CUDA device, behind the engine contract.

The kinds of call that repeat every step (``step``, ``verify``) are recorded; see ``TensorRtProgram``.

Aliasing: KV_CACHE_UPDATE writes in place only where the plan declares ``new_key.l`` an alias of
``key.l``; both are bound to one address, and a plan that declares no alias is refused at load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from outrider.engines.accelerators.device.cuda import CudaDevice, compute_capability
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.padding import row_sizes
from outrider.engines.accelerators.device.sources import READ, PlanSources, choose_read_plan
from outrider.engines.accelerators.device.tensors import CACHE_DTYPES, ModelTensors
from outrider.engines.accelerators.device.tree_plans import tree_entries
from outrider.engines.accelerators.device.trees import PlanTrees
from outrider.engines.accelerators.tensorrt.api import TensorRtApi, installed_apis
from outrider.engines.accelerators.tensorrt.kernel_cache import KernelCache, kernel_file
from outrider.engines.accelerators.tensorrt.program import TensorRtProgram
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import SOURCE
from outrider.engines.bundle.manifest import Manifest, ModelEntry
from outrider.engines.bundle.plans import (
    PREFILL,
    Machine,
    PlanEntry,
    Shape,
    why_unfit,
)

log = logging.getLogger(__name__)

# A machine with plans of several precisions takes the first of these.
PRECISIONS = ("float16", "bfloat16", "float8", "float32")
# Profiles whose runs are too many or too long to record.
_UNRECORDED = (PREFILL, READ)


def open_tensorrt(
    bundle: Bundle,
    model: ModelEntry,
    part: str,
    *,
    device: CudaDevice,
    owns_device: bool = False,
    max_batch: int | None = None,
    with_trees: bool = False,
) -> PlanEngine:
    """Engine over the plans of one model that fit this machine.

    The device stays the caller's, unless the engine owns it from then on.

    Raises:
        BundleError: a plan is not what the manifest says of it.
        EngineError: there is no TensorRT, no such device, or no plan that fits them; says why for each plan.
    """
    manifest = bundle.manifest
    api = serving_api(installed_apis(), manifest, device.compute_capability)
    machine = api.machine(device.compute_capability)
    chosen = choose_engine_plans(manifest, part, machine, with_trees=with_trees)
    limits = bundle.limits(model, max_batch, with_trees=chosen.trees is not None)

    kernels = KernelCache(kernel_file(bundle.root.resolve(), machine))

    def load(entry: PlanEntry) -> TensorRtPlan:
        return TensorRtPlan(api, device, bundle, model, entry, kernels)

    trees = None
    if chosen.trees is not None:
        verify, keep = map(load, chosen.trees)
        trees = PlanTrees([verify], [keep], device, last_position=limits.max_context - 1)
    sources = None
    if model.source is not None:
        precision = chosen.chains.precision
        entry = choose_read_plan(manifest.plans, part, precision=precision, machine=machine)
        sources = PlanSources(load(entry), device, model, model.source, limits)
    chains = load(chosen.chains)
    kernels.save()
    return PlanEngine(
        [chains],
        device,
        model,
        limits,
        owns_device=owns_device,
        row_sizes=row_sizes(limits.max_batch),
        trees=trees,
        sources=sources,
    )


class EnginePlans(NamedTuple):
    """Plans of one engine, of one precision and capacity.

    Attributes:
        chains: the model's.
        trees: those that verify trees and keep their paths; None where no trees are taken.
    """

    chains: PlanEntry
    trees: tuple[PlanEntry, PlanEntry] | None = None


def choose_engine_plans(
    manifest: Manifest,
    part: str,
    machine: Machine,
    *,
    with_trees: bool,
) -> EnginePlans:
    """Choose the plans that an engine of a part runs on a machine.

    Raises:
        EngineError: no plan fits; says why for each one.
    """
    chains = choose_plan(manifest.plans, part, machine)
    trees = tree_entries(manifest.plans, part, chains) if with_trees else None
    if with_trees and trees is None:
        log.info("%s: no plan takes trees; drafts are chains", part)
    return EnginePlans(chains, trees)


def check_plans(bundle: Bundle, index: int) -> None:
    """Refuse a machine on which the bundle's plans do not run; no plan is loaded.

    Raises:
        EngineError: no TensorRT, no such device, a model without a plan that fits them, or one that the driver
            refuses, in the library's words.
    """
    manifest, capability = bundle.manifest, compute_capability(index)
    api = serving_api(installed_apis(), manifest, capability)
    for part in _models(manifest):
        api.check_valid(
            bundle.root / choose_plan(manifest.plans, part, api.machine(capability)).path
        )


def serving_api(
    apis: Sequence[TensorRtApi], manifest: Manifest, compute_capability: str
) -> TensorRtApi:
    """The first of the installed flavours for which every model has a plan that fits.

    Raises:
        EngineError: there is none; says why for each of them.
    """
    reasons = []
    for api in apis:
        try:
            for part in _models(manifest):
                machine = api.machine(compute_capability)
                precision = choose_plan(manifest.plans, part, machine).precision
                if manifest.text2text is not None:
                    choose_read_plan(manifest.plans, part, precision=precision, machine=machine)
        except EngineError as error:
            reasons.append(str(error))
        else:
            return api
    raise EngineError("; ".join(reasons))


def _models(manifest: Manifest) -> Sequence[str]:
    return ("target",) if manifest.draft is None else ("target", "draft")


def choose_plan(plans: tuple[PlanEntry, ...], part: str, machine: Machine) -> PlanEntry:
    """The plan of a part that runs here: of the first of ``PRECISIONS``, the one of the largest cache.

    Raises:
        EngineError: there is none; says why each one was left aside.
    """
    ours = [plan for plan in plans if plan.part == part]
    reasons = [why_unfit(plan, machine) for plan in ours]
    fitting = [plan for plan, reason in zip(ours, reasons, strict=True) if not reason]
    if not fitting:
        flavour, _, capability = machine
        advice = f"outrider build --flavour {flavour} --compute-capability {capability}"
        text = "; ".join(reasons) or "the bundle has none"
        raise EngineError(f"no TensorRT plan of the {part} fits: {text}; run {advice}")
    order = {precision: rank for rank, precision in enumerate(PRECISIONS)}
    return min(fitting, key=lambda plan: (order.get(plan.precision, len(order)), -plan.capacity))


class TensorRtPlan:
    """One plan of a model, loaded; see ``LoadedPlan``."""

    is_by_token = False

    def __init__(
        self,
        api: TensorRtApi,
        device: CudaDevice,
        bundle: Bundle,
        model: ModelEntry,
        entry: PlanEntry,
        kernels: KernelCache,
    ) -> None:
        if entry.precision not in CACHE_DTYPES:
            raise BundleError(f"{entry.path}: precision {entry.precision!r} is unknown")
        self.entry = entry
        self._device = device
        self._tensors = ModelTensors(model, entry)
        self._program = TensorRtProgram(api, device, bundle, entry, kernels)
        reads = SOURCE in self._program.inputs
        self._program.check_aliases(self._tensors.source_pairs if reads else self._tensors.pairs)
        num_bytes = self._program.scratch_bytes
        self._scratch = device.allocate(num_bytes)
        self._program.prepare(self._scratch, num_bytes)
        device.wait()

    @property
    def inputs(self) -> Set[str]:
        """Names of the tensors that the plan reads."""
        return self._program.inputs

    def run(self, profile: int, shape: Shape, addresses: Mapping[str, int]) -> None:
        """Enqueue the graph; see ``LoadedPlan.run``.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        repeats = self.entry.profiles[profile].name not in _UNRECORDED
        self._program.run(profile, self._tensors.call(shape, addresses), may_record=repeats)

    def close(self) -> None:
        """Free contexts, recordings and scratch memory."""
        self._program.close()
        self._device.free(self._scratch)
