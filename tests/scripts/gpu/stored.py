"""Bundles of every storage of weights, made of one in float32 without its checkpoints and without certificates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.names import DEVICE_FILE, MODEL_FILE
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.checkpoint import open_checkpoint
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.half_weights import HALF_TYPES, store_halves


def store_bundle(
    source: Path,
    out: Path,
    checkpoints: tuple[Path, Path],
    weights: str,
    precision: str,
    *,
    change: Callable[[Path], None] | None = None,
) -> Bundle:
    """Copy a bundle, its weights stored otherwise, with the graphs that accelerators then run.

    Args:
        source: bundle in float32 with a target and a draft.
        out: folder to make.
        checkpoints: of target and draft.
        weights: "float32", "float16", "bfloat16", "int8" or "int4".
        precision: of accelerators; "float32", "float16" or "bfloat16".
        change: made to the graph of chains.
    """
    shutil.copytree(source, out)
    manifest = load_bundle(out).manifest
    entries = {}
    for part, folder in zip(("target", "draft"), checkpoints, strict=True):
        path = out / part / MODEL_FILE
        if weights in ("int8", "int4"):
            checkpoint = open_checkpoint(folder, max_context=manifest.max_context)
            quantize_file(path, weights, checkpoint.model_config)
        elif weights in HALF_TYPES:
            store_halves(path, weights)
        derive_device_graphs(path, precision, with_trees=True)
        if change is not None:
            change(path.with_name(DEVICE_FILE))
        model = getattr(manifest, part)
        entries[part] = replace(model, weights=weights, device_precision=precision)
    write_manifest(out, replace(manifest, files=hash_files(out), **entries))
    return load_bundle(out)
