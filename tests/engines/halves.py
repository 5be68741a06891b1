"""A bundle with float16 weights made of one in float32, without its checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import (
    GROUPED_FILE,
    MODEL_FILE,
    Bundle,
    load_bundle,
    write_manifest,
)
from outrider.export.graph.device_graphs import derive_device_graphs
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.weights.half_weights import FLOAT16, store_halves


def halve_bundle(source: Path, out: Path, kind: str = FLOAT16, **limits: int) -> Bundle:
    """A copy with weights and graphs for accelerators in 16 bits, and other limits."""
    shutil.copytree(source, out)
    manifest = load_bundle(out).manifest
    entries = {}
    for part, model in (("target", manifest.target), ("draft", manifest.draft)):
        path = out / model.path / MODEL_FILE
        path.with_name(GROUPED_FILE).unlink()
        store_halves(path, kind)
        derive_tree_graphs(path)
        derive_device_graphs(path, kind, with_trees=True)
        entries[part] = replace(model, weights=kind, device_precision=kind)
    write_manifest(out, replace(manifest, files=hash_files(out), **entries, **limits))
    return load_bundle(out)
