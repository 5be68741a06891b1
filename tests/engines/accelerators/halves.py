"""A bundle that accelerators compute in 16 bits of, made of one in float32 without its checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.names import (
    DEVICE_FILES,
    GROUPED_FILE,
    KEEP_PATH_FILE,
    MODEL_FILE,
    TREE_FILE,
)
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.weights.blocks import BITS, quantize_file
from outrider.export.weights.half_weights import FLOAT16, store_halves


def halve_bundle(
    source: Path,
    out: Path,
    kind: str = FLOAT16,
    precision: str | None = None,
    *,
    with_trees: bool = True,
    **limits: int,
) -> Bundle:
    """A copy with weights of another kind, graphs for accelerators in 16 bits, and other limits.

    Without a precision the kind is one.
    """
    precision = precision or kind
    shutil.copytree(source, out)
    manifest = load_bundle(out).manifest
    entries = {}
    for part, model in (("target", manifest.target), ("draft", manifest.draft)):
        path = out / model.path / MODEL_FILE
        for name in (GROUPED_FILE, TREE_FILE, KEEP_PATH_FILE, *DEVICE_FILES):
            path.with_name(name).unlink()
        (quantize_file if kind in BITS else store_halves)(path, kind)
        if with_trees:
            derive_tree_graphs(path)
        derive_device_graphs(path, precision, with_trees=with_trees)
        num_nodes = model.max_tree_nodes if with_trees else 0
        entries[part] = replace(
            model, weights=kind, device_precision=precision, max_tree_nodes=num_nodes
        )
    write_manifest(out, replace(manifest, files=hash_files(out), **entries, **limits))
    return load_bundle(out)
