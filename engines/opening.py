"""Engines run what was exported; this is the one table that imports their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from outrider.engines.accelerators.device.sampling.tensors import SAMPLER_FOLDER
from outrider.engines.base import BundleError, Engine, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.determinism import BitEquality, has_equal_bits
from outrider.engines.devices import (
    CPU,
    CUDA,
    TENSORRT,
    Choice,
    Device,
    choose,
    parse_device,
)

if TYPE_CHECKING:
    from outrider.engines.accelerators.device.engine import PlanEngine
    from outrider.engines.accelerators.device.sampling.sampler import GraphSampler
    from outrider.engines.pair import Pair


def open_engine(
    bundle: Bundle,
    which: Literal["target", "draft"],
    *,
    device: str = "cpu",
    num_threads: int = 2,
    max_batch: int | None = None,
    with_trees: bool = False,
    provider_options: Mapping[str, str] | None = None,
    beside: Engine | None = None,
) -> Engine:
    """One model of a bundle, ready to extend.

    Args:
        bundle: from ``load_bundle``.
        which: which of its models.
        device: "cpu", "cuda[:N]", "tensorrt[:N]" or "auto".
        num_threads: of the pool that all engines of the process share.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the graphs that verify trees too, where bundle and backend have them.
        provider_options: of ONNX Runtime's CUDA provider, as it documents them.
        beside: the bundle's target, which a draft that shares its encoder serves with; None for a draft alone, which
            has its own.

    Raises:
        BundleError: the bundle has no such model, or its graph does not fit the manifest.
        EngineError: the backend cannot load it.
    """
    entry = bundle.manifest.target if which == "target" else bundle.manifest.draft
    if entry is None:
        raise BundleError("the bundle has no draft model")
    chosen = parse_or_choose(device, bundle)
    options: dict[str, Any] = {"max_batch": max_batch, "with_trees": with_trees}
    if chosen.kind != TENSORRT:
        options["num_threads"] = num_threads
    if chosen.kind == CPU:
        options["beside"] = beside
    engine = _open_one(bundle, entry, which, chosen, options, provider_options)
    with ExitStack() as undo:
        undo.callback(engine.close)
        bundle.take_mapped()
        undo.pop_all()
    return engine


def _open_one(
    bundle: Bundle,
    entry: ModelEntry,
    which: str,
    chosen: Device,
    options: Mapping[str, Any],
    provider_options: Mapping[str, str] | None,
) -> Engine:
    if chosen.kind == CPU:
        from outrider.engines.onnx.engine import OnnxEngine

        return OnnxEngine(bundle, entry, **options)
    memory = _open_memory(chosen)
    with ExitStack() as undo:
        undo.callback(memory.close)
        engine: Engine
        if chosen.kind == TENSORRT:
            from outrider.engines.accelerators.tensorrt.engine import open_tensorrt

            engine = open_tensorrt(bundle, entry, which, device=memory, owns_device=True, **options)
        else:
            from outrider.engines.accelerators.onnx.device_plan import open_on_device

            engine = open_on_device(
                bundle,
                entry,
                memory,
                owns_device=True,
                provider_options=provider_options,
                **options,
            )
        undo.pop_all()
    return engine


def open_pair(
    bundle: Bundle,
    *,
    device: str = "cpu",
    sampler: str = "auto",
    num_threads: int = 2,
    max_batch: int | None = None,
    with_trees: bool = False,
    provider_options: Mapping[str, str] | None = None,
) -> Pair:
    """The models of a bundle and their sampler, ready to serve.

    The sampler is "host", "device", or "auto": the device, where it is an accelerator. All else is as
    ``open_engine`` takes it.

    Raises:
        BundleError: a graph does not fit the manifest, or the bundle lacks what was asked for.
        EngineError: the backend cannot load it, or the sampler cannot be where it was asked for.
    """
    chosen = parse_or_choose(device, bundle)
    from outrider.engines.pair import DEVICE, choose_place, open_on_host

    rows = max_batch or bundle.manifest.max_batch
    options: dict[str, Any] = {
        "num_threads": num_threads,
        "max_batch": rows,
        "provider_options": _options_for(chosen, provider_options),
    }
    missing = _why_no_sampler(bundle, chosen)
    place, reason = choose_place(sampler, is_accelerator=chosen.kind != CPU, missing=missing)
    if place == DEVICE:
        pair = _open_together(bundle, chosen, reason, with_trees=with_trees, **options)
        with ExitStack() as undo:
            undo.callback(pair.close)
            bundle.take_mapped()
            undo.pop_all()
        return pair
    options["device"] = str(chosen)
    draft = None
    with ExitStack() as undo:
        target = open_engine(bundle, "target", with_trees=with_trees, **options)
        undo.callback(target.close)
        if bundle.manifest.draft is not None:
            draft = open_engine(bundle, "draft", with_trees=with_trees, beside=target, **options)
            undo.callback(draft.close)
        pair = open_on_host(target, draft, bundle, rows, reason)
        undo.pop_all()
    return pair


def judge_bits(bundle: Bundle, pair: Pair) -> tuple[BitEquality, str]:
    """Return what is known of the claim that a row's bits depend on nothing beside it, and what was compared.

    Where ONNX Runtime is not the version that the bundle's certificate was made with, a few dozen passes of each model
    decide; the second value is empty where nothing had to be compared.
    """
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    if not all(engine.is_row_invariant for engine in engines):
        return BitEquality.NOT_CLAIMED, ""
    from outrider.engines.onnx.session import LIBRARY_VERSION

    certified = bundle.manifest.versions.get("onnxruntime", "of an unknown version")
    if certified == LIBRARY_VERSION:
        return BitEquality.CERTIFIED, ""
    line = (
        f"onnxruntime is {LIBRARY_VERSION}, the bundle was certified with {certified}: a row's bits"
    )
    if all(has_equal_bits(engine) for engine in engines):
        return BitEquality.CONFIRMED, f"{line} were compared and are the same in all shapes"
    return (
        BitEquality.WITHDRAWN,
        f"{line} differ between shapes; answers keep their distributions, but greedy and seed_stable ones may depend "
        "on what runs beside them",
    )


def _open_together(
    bundle: Bundle,
    chosen: Device,
    reason: str,
    *,
    num_threads: int,
    max_batch: int,
    with_trees: bool,
    provider_options: Mapping[str, str],
) -> Pair:
    from outrider.engines.pair import open_together

    memory = _open_memory(chosen)

    def open_model(entry: ModelEntry, part: str) -> PlanEngine:
        if chosen.kind == TENSORRT:
            from outrider.engines.accelerators.tensorrt.engine import open_tensorrt

            return open_tensorrt(
                bundle, entry, part, device=memory, max_batch=max_batch, with_trees=with_trees
            )
        from outrider.engines.accelerators.onnx.device_plan import open_on_device

        return open_on_device(
            bundle,
            entry,
            memory,
            num_threads=num_threads,
            max_batch=max_batch,
            with_trees=with_trees,
            provider_options=provider_options,
        )

    def open_sampler() -> GraphSampler:
        return _open_sampler(bundle, chosen, memory, max_batch, num_threads, provider_options)

    return open_together(
        bundle, memory, open_model, open_sampler, max_batch=max_batch, reason=reason
    )


def _open_sampler(
    bundle: Bundle,
    chosen: Device,
    memory: Any,
    max_batch: int,
    num_threads: int,
    provider_options: Mapping[str, str],
) -> GraphSampler:
    """Sampler over a device: as kernels, else as plans, else as graphs on ONNX Runtime."""
    sizes: dict[str, Any] = {
        "max_batch": max_batch,
        "max_gamma": bundle.manifest.max_gamma,
        "vocab_size": bundle.manifest.target.vocab_size,
    }
    if chosen.kind != CPU and not _why_no_kernels(chosen.index):
        from outrider.engines.accelerators.device.sampling.kernels.compiled import CudaKernels
        from outrider.engines.accelerators.device.sampling.kernels.graphs import open_kernel_sampler

        return open_kernel_sampler(CudaKernels(memory), device=memory, **sizes)
    if chosen.kind == TENSORRT and not _why_no_sampler_plans(bundle, chosen.index):
        from outrider.engines.accelerators.tensorrt.sampler import open_tensorrt_sampler

        return open_tensorrt_sampler(bundle, memory, max_batch=max_batch)
    from outrider.engines.accelerators.onnx.sampler import open_onnx_sampler

    return open_onnx_sampler(
        _sampler_graphs(bundle),
        device=memory,
        num_threads=num_threads,
        provider_options=provider_options,
        **sizes,
    )


def _sampler_graphs(bundle: Bundle) -> dict[str, bytes]:
    """Return the sampler's graphs by file name: a graph is loaded when it is first used, perhaps days from now."""
    names = [name for name in bundle.manifest.files if name.startswith(f"{SAMPLER_FOLDER}/")]
    return {name.removeprefix(f"{SAMPLER_FOLDER}/"): bundle.read(name) for name in names}


def _open_memory(chosen: Device) -> Any:
    """The device's memory and stream; its type is known only where CUDA's bindings are."""
    if chosen.kind == CPU:
        from outrider.engines.accelerators.device.base import HostDevice

        return HostDevice()
    from outrider.engines.accelerators.device.cuda import CudaDevice

    return CudaDevice(chosen.index)


def _why_no_sampler(bundle: Bundle, chosen: Device) -> str:
    """Say why a bundle's sampler does not run on a device; empty where it does."""
    from outrider.engines.pair import why_no_graphs

    if chosen.kind != CPU and not _why_no_kernels(chosen.index):
        return ""
    if reason := why_no_graphs(bundle):
        return reason
    if chosen.kind == CPU:
        return ""
    if chosen.kind == CUDA:
        return _why_no_cuda(chosen.index)
    without_plans = _why_no_sampler_plans(bundle, chosen.index)
    without_cuda = _why_no_cuda(chosen.index) if without_plans else ""
    return f"{without_plans}; {without_cuda}" if without_cuda else ""


def choose_device(text: str, bundle: Bundle) -> Choice:
    """The device that will serve a bundle, and why.

    Args:
        text: as ``open_engine`` takes it.
        bundle: whose plans TensorRT would need.

    Raises:
        EngineError: it is no device, or the one asked for cannot serve this bundle.
    """
    probes = {
        TENSORRT: lambda index: _why_no_tensorrt(bundle, index),
        CUDA: lambda index: _why_no_cuda(index) or _why_no_device_graphs(bundle, index),
    }
    return choose(text, probes)


def parse_or_choose(text: str, bundle: Bundle) -> Device:
    """The device asked for, without a look whether it is there, or the best that is.

    Raises:
        EngineError: it is no device.
    """
    asked = parse_device(text)
    return choose_device(text, bundle).device if asked is None else asked


def _why_no_tensorrt(bundle: Bundle, index: int) -> str:
    try:
        from outrider.engines.accelerators.tensorrt.engine import check_plans
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        check_plans(bundle, index)
    except EngineError as error:
        return str(error)
    return ""


def _why_no_kernels(index: int) -> str:
    """Say why the sampler does not run as kernels; the graphs of the bundle may instead."""
    try:
        from outrider.engines.accelerators.device.cuda import compute_capability
        from outrider.engines.accelerators.device.sampling.kernels.compiled import why_no_compiler
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        return why_no_compiler(compute_capability(index))
    except EngineError as error:
        return str(error)


def _why_no_sampler_plans(bundle: Bundle, index: int) -> str:
    """Say why TensorRT does not run the sampler itself; ONNX Runtime's CUDA provider may instead."""
    from outrider.engines.accelerators.tensorrt.sampler import check_sampler_plans

    try:
        check_sampler_plans(bundle, index)
    except EngineError as error:
        return str(error)
    return ""


def _options_for(chosen: Device, asked: Mapping[str, str] | None) -> dict[str, str]:
    """Options of the CUDA provider, refused where nothing would read them."""
    if asked and chosen.kind == CPU:
        raise EngineError(f"provider option {min(asked)}: device {chosen} has no such provider")
    return dict(asked or {})


def _why_no_device_graphs(bundle: Bundle, index: int) -> str:
    from outrider.engines.accelerators.device.cuda import compute_capability

    capability = compute_capability(index)
    models = (bundle.manifest.target, bundle.manifest.draft)
    reasons = (bundle.why_no_device(model, capability) for model in models if model is not None)
    return next(filter(None, reasons), "")


def _why_no_cuda(index: int) -> str:
    try:
        from outrider.engines.onnx.session import why_unavailable
    except ImportError:  # plans alone can serve
        return "onnxruntime is not installed"
    if reason := why_unavailable(CUDA):
        return reason
    try:
        from outrider.engines.accelerators.device.cuda import compute_capability
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        compute_capability(index)
    except EngineError as error:
        return str(error)
    return ""
