"""Engines run what was exported; this is the one table that imports their libraries."""

from __future__ import annotations

from typing import Literal

from engines.base import BundleError, Engine, EngineError
from engines.bundle import Bundle
from engines.devices import CUDA, TENSORRT, Choice, choose, parse_device


def open_engine(
    bundle: Bundle,
    which: Literal["target", "draft"],
    *,
    device: str = "cpu",
    num_threads: int = 2,
    max_batch: int | None = None,
    with_trees: bool = False,
) -> Engine:
    """One model of a bundle, ready to extend.

    Args:
        bundle: from ``load_bundle``.
        which: which of its models.
        device: "cpu", "cuda[:N]", "tensorrt[:N]" or "auto".
        num_threads: of the pool that all engines of the process share.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the graphs that verify trees too, where bundle and backend have them.

    Raises:
        BundleError: the bundle has no such model, or its graph does not fit the manifest.
        EngineError: the backend cannot load it.
    """
    entry = bundle.manifest.target if which == "target" else bundle.manifest.draft
    if entry is None:
        raise BundleError("the bundle has no draft model")
    chosen = parse_device(device) or choose_device(device, bundle).device
    if chosen.kind == TENSORRT:
        from engines.tensorrt_engine import open_tensorrt

        return open_tensorrt(bundle, entry, which, index=chosen.index, max_batch=max_batch)
    from engines.onnx_engine import OnnxEngine

    return OnnxEngine(
        bundle,
        entry,
        device=chosen.kind,
        device_index=chosen.index,
        num_threads=num_threads,
        max_batch=max_batch,
        with_trees=with_trees,
    )


def choose_device(text: str, bundle: Bundle) -> Choice:
    """The device that will serve a bundle, and why.

    Args:
        text: as ``open_engine`` takes it.
        bundle: whose plans TensorRT would need.

    Raises:
        EngineError: it is no device, or the one asked for cannot serve this bundle.
    """
    return choose(
        text, {TENSORRT: lambda index: _why_no_tensorrt(bundle, index), CUDA: _why_no_cuda}
    )


def _why_no_tensorrt(bundle: Bundle, index: int) -> str:
    try:
        from engines.tensorrt_engine import check_plans
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        check_plans(bundle, index)
    except EngineError as error:
        return str(error)
    return ""


def _why_no_cuda(index: int) -> str:
    from engines.onnx_session import why_unavailable

    if reason := why_unavailable(CUDA):
        return reason
    try:
        from engines.cuda_device import compute_capability
    except ImportError:  # the provider itself will say whether it starts
        return ""
    try:
        compute_capability(index)
    except EngineError as error:
        return str(error)
    return ""
