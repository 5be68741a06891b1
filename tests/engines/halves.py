"""A bundle with float16 weights made of one in float32, without its checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import (
    GROUPED_FILE,
    KEEP_PATH_FILE,
    MODEL_FILE,
    TREE_FILE,
    Bundle,
    load_bundle,
    write_manifest,
)
from outrider.export.weights.half_graph import derive_half_graph
from outrider.export.weights.half_weights import FLOAT16, store_float16


def halve_bundle(source: Path, out: Path, **limits: int) -> Bundle:
    """A copy whose models take chains alone, with weights in float16 and other limits."""
    shutil.copytree(source, out)
    manifest = load_bundle(out).manifest
    entries = {}
    for part, model in (("target", manifest.target), ("draft", manifest.draft)):
        folder = out / model.path
        for name in (GROUPED_FILE, TREE_FILE, KEEP_PATH_FILE):
            (folder / name).unlink(missing_ok=True)
        store_float16(folder / MODEL_FILE)
        derive_half_graph(folder / MODEL_FILE)
        entries[part] = replace(model, weights=FLOAT16, max_tree_nodes=0)
    write_manifest(out, replace(manifest, files=hash_files(out), **entries, **limits))
    return load_bundle(out)
