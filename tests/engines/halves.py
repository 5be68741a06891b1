"""A bundle with float16 weights made of one in float32, without its checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import (
    DEVICE_FILES,
    GROUPED_FILE,
    KEEP_PATH_FILE,
    MODEL_FILE,
    TREE_FILE,
    Bundle,
    load_bundle,
    write_manifest,
)
from outrider.export.graph.device_graphs import derive_device_graphs
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.weights.half_weights import FLOAT16, store_halves


def halve_bundle(
    source: Path, out: Path, kind: str = FLOAT16, *, with_trees: bool = True, **limits: int
) -> Bundle:
    """A copy with weights and graphs for accelerators in 16 bits, and other limits."""
    shutil.copytree(source, out)
    manifest = load_bundle(out).manifest
    entries = {}
    for part, model in (("target", manifest.target), ("draft", manifest.draft)):
        path = out / model.path / MODEL_FILE
        for name in (GROUPED_FILE, TREE_FILE, KEEP_PATH_FILE, *DEVICE_FILES):
            path.with_name(name).unlink()
        store_halves(path, kind)
        if with_trees:
            derive_tree_graphs(path)
        derive_device_graphs(path, kind, with_trees=with_trees)
        num_nodes = model.max_tree_nodes if with_trees else 0
        entries[part] = replace(
            model, weights=kind, device_precision=kind, max_tree_nodes=num_nodes
        )
    write_manifest(out, replace(manifest, files=hash_files(out), **entries, **limits))
    return load_bundle(out)
