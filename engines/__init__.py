"""Engines run what was exported; ``open_engine`` is the one table that imports their libraries."""

from __future__ import annotations

from typing import Literal

from engines.base import BundleError, Engine
from engines.bundle import Bundle


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
        device: "cpu" or "cuda".
        num_threads: of the pool that all engines of the process share.
        max_batch: slots; None for all the bundle allows.
        with_trees: load the graphs that verify trees too, where the bundle has them.

    Raises:
        BundleError: the bundle has no such model, or its graph does not fit the manifest.
        EngineError: the backend cannot load it.
    """
    entry = bundle.manifest.target if which == "target" else bundle.manifest.draft
    if entry is None:
        raise BundleError("the bundle has no draft model")
    from engines.onnx_engine import OnnxEngine

    return OnnxEngine(
        bundle,
        entry,
        device=device,
        num_threads=num_threads,
        max_batch=max_batch,
        with_trees=with_trees,
    )
