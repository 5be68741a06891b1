"""TensorRT plans built from a bundle's graphs into the bundle, hashed and declared in its manifest.

Plans are executable content: engines load only a file whose hash the manifest holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from outrider.engines.accelerators.device.cuda import compute_capability
from outrider.engines.accelerators.tensorrt.api import TensorRtApi, find_api
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import fingerprint
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.plans import (
    DEFAULT_OPT_BATCH,
    PLANS_FOLDER,
    PlanEntry,
    is_of_model,
    plan_capacities,
)
from outrider.engines.kv_cache import coarse_capacities
from outrider.export.accelerators.float8 import FLOAT8, LEAST_CAPABILITY
from outrider.export.accelerators.tensorrt.graph import PRECISIONS
from outrider.export.accelerators.tensorrt.network import PlanJob, Report, build_plan
from outrider.export.accelerators.tensorrt.parts import PlanPart, plan_parts
from outrider.export.gguf.folder import KEPT_KINDS
from outrider.export.scratch import scratch_folder
from outrider.export.weights.w8a8 import INTEGER_KINDS

_HASH_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        flavour: "tensorrt" or "rtx"; None for the one installed.
        compute_capabilities: of the GPUs to build for; empty for the GPU at hand.
        precision: of weights, caches and matrix products, one of ``PRECISIONS``.
        gamma: draft tokens per step that the verify profile is tuned for; cut to the bundle's.
        opt_batch: rows that the kernels are tuned for; cut to the bundle's.
        timing_cache: file of measured kernel choices, read and renewed; None for none.
        parts: of ``export.accelerators.tensorrt.parts.PARTS``; empty for all that the bundle has but plans for
            trees, which hold the weights once more.
    """

    flavour: str | None = None
    compute_capabilities: tuple[str, ...] = ()
    precision: str = "float16"
    gamma: int = 4
    opt_batch: int = DEFAULT_OPT_BATCH
    timing_cache: Path | None = None
    parts: tuple[str, ...] = ()


def build_plans(root: Path, options: BuildOptions, *, report: Report) -> Bundle:
    """Build the plans of a bundle, put them into it with their hashes, and load it again.

    Of each part there is one plan, over caches that hold the longest text: a plan has its own copy of the weights, and
    attention reads no columns that its mask hides whole. Plans of the same part, flavour, version, GPU and precision
    are replaced, of smaller caches too, which older versions built. Plan files
    carry their hash in their name and are in place before the manifest names them, so a killed
    build leaves the bundle as it was.

    Args:
        root: bundle; changed only after everything was built.
        options: of the build.
        report: called with a phase in words, the step reached and the number of steps.

    Raises:
        BundleError: the bundle does not fit its manifest, or an option does not fit the bundle.
        EngineError: no TensorRT, an unknown GPU, or the library refused, in its own words.
    """
    bundle = load_bundle(root)
    api = find_api(options.flavour)
    _check_precision(options.precision)
    capabilities = _check_capabilities(api, options.compute_capabilities)
    _check_float8(options.precision, capabilities)
    capacity = plan_capacities(coarse_capacities(bundle.limits(bundle.manifest.target)))[-1]
    parts = plan_parts(bundle, options.parts)
    root = bundle.root
    with scratch_folder(root.parent, f".{root.name}.plans-") as building:
        entries: list[PlanEntry] = []
        for part, capability in product(parts, capabilities):
            entry = _plan_entry(api, part, options, capability, part.own_capacity or capacity)
            file = building / f"{len(entries)}.plan"
            file.write_bytes(_build(api, part, entry, options, building, report))
            entries.append(_install_file(root, file, entry))
        _declare(bundle, entries)
    return load_bundle(root)


def _plan_entry(
    api: TensorRtApi, part: PlanPart, options: BuildOptions, capability: str, capacity: int
) -> PlanEntry:
    """Return the entry of a plan to build; its path lacks the hash and the suffix."""
    machine = f"{api.flavour}-{api.version}-sm{capability.replace('.', '')}"
    return PlanEntry(
        path=f"{PLANS_FOLDER}/{machine}/{part.label}-{options.precision}-{capacity}",
        part=part.name,
        flavour=api.flavour,
        version=api.version,
        compute_capability=capability,
        precision=options.precision,
        capacity=capacity,
        profiles=part.profiles(options.gamma, options.opt_batch),
    )


def _build(
    api: TensorRtApi,
    part: PlanPart,
    entry: PlanEntry,
    options: BuildOptions,
    folder: Path,
    report: Report,
) -> bytes:
    derived = part.derive(folder, entry.precision, entry.capacity)
    job = PlanJob(
        graph=derived.graph,
        num_attentions=derived.num_attentions,
        profiles=entry.profiles,
        precision=entry.precision,
        compute_capability=entry.compute_capability,
        timing_cache=options.timing_cache,
        updates=derived.updates,
    )
    name = Path(entry.path).name
    try:
        return build_plan(
            api, job, lambda phase, step, size: report(f"{name}: {phase}", step, size)
        )
    except EngineError as error:
        raise EngineError(f"{part.name}: {_refusal(part, error)}") from error


def _refusal(part: PlanPart, error: EngineError) -> str:
    """Return the library's words when it refuses a part, with the alternative if there is one."""
    if part.weights in INTEGER_KINDS:
        return (
            f"{part.weights} weights are refused; export with "
            f"--weights float16 and build that bundle ({error})"
        )
    if part.weights in KEPT_KINDS:
        return f"{part.weights} weights are refused; export with --weights float32 and build that bundle ({error})"
    return str(error)


def _install_file(root: Path, file: Path, entry: PlanEntry) -> PlanEntry:
    """Move a plan to the path of its entry and its hash; nobody reads it until it is declared."""
    path = f"{entry.path}-{fingerprint(file).sha256[:_HASH_LETTERS]}.plan"
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    file.replace(root / path)
    return replace(entry, path=path)


def _declare(bundle: Bundle, entries: Sequence[PlanEntry]) -> None:
    """Write new plans to the manifest and remove those they replace."""
    manifest, root = bundle.manifest, bundle.root
    kinds = {_kind(entry) for entry in entries}
    # Of what no model runs, such as the sampler of an older bundle, nothing is kept.
    kept = [plan for plan in manifest.plans if _kind(plan) not in kinds and is_of_model(plan.part)]
    paths = {entry.path for entry in entries}
    replaced = {plan.path for plan in manifest.plans} - {plan.path for plan in kept} - paths
    files = {name: entry for name, entry in manifest.files.items() if name not in replaced}
    files |= {path: fingerprint(root / path) for path in paths}
    plans = tuple(sorted((*kept, *entries), key=lambda plan: plan.path))
    write_manifest(root, replace(manifest, files=files, plans=plans))
    for path in replaced:
        (root / path).unlink()


def _kind(plan: PlanEntry) -> PlanEntry:
    """Return the entry without file, tuning and cache: a new plan replaces one of the same kind."""
    return replace(plan, path="", capacity=0, profiles=())


def _check_precision(precision: str) -> None:
    if precision in INTEGER_KINDS:
        raise BundleError(
            f"precision {precision!r}: weights of integers are the bundle's own; export with "
            f"--weights {precision} and build that bundle with --precision float16"
        )
    if precision not in PRECISIONS:
        raise BundleError(f"precision {precision!r}: must be one of {', '.join(PRECISIONS)}")


def _check_float8(precision: str, capabilities: Sequence[str]) -> None:
    """Refuse 8-bit floats for GPUs that have none."""
    for capability in capabilities:
        if precision == FLOAT8 and _number(capability) < _number(LEAST_CAPABILITY):
            raise EngineError(
                f"compute capability {capability}: {FLOAT8} needs {LEAST_CAPABILITY} or later; build "
                "with --precision float16, or export with --weights int8 or int4 and build that bundle"
            )


def _number(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def _check_capabilities(api: TensorRtApi, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the capabilities to build for; refuse those that the flavour cannot build for here."""
    if wanted and api.builds_ahead_of_time:
        for capability in wanted:
            api.check_compute_capability(capability)
        return tuple(dict.fromkeys(wanted))
    found = _capability_at_hand(api)
    for capability in wanted:
        if capability != found:
            raise EngineError(
                f"compute capability {capability}: TensorRT builds for the GPU at hand ({found}); "
                "--flavour rtx builds for others"
            )
    return (found,)


def _capability_at_hand(api: TensorRtApi) -> str:
    try:
        return compute_capability(0)
    except EngineError as error:
        advice = "TensorRT builds on the GPU it serves from; --flavour rtx builds ahead of time"
        if api.builds_ahead_of_time:
            advice = "name --compute-capability to build ahead of time"
        raise EngineError(f"no GPU to build for ({error}); {advice}") from error
