"""What a manifest says of caches whose layers differ in size: read as written, refused where it contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import REQUIRES_VERSION, Manifest
from outrider.engines.opening import open_engine

from tests.engines.handmade import write_bundle


def change(root: Path, *, requires: list[str] | None = None, **fields: Any) -> None:
    """Give the target other fields."""
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    data["target"].update(fields)
    data |= {
        "schema_version": REQUIRES_VERSION,
        "requires": ["caches"] if requires is None else requires,
    }
    path.write_text(json.dumps(data))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def test_sizes_are_read_as_they_were_written(root: Path) -> None:
    target = load_bundle(root).manifest.target
    others = tuple((2 * heads, size) for heads, size in target.heads)
    caches = (*target.heads, *others)
    change(root, caches=caches, num_layers=len(caches))
    manifest = load_bundle(root).manifest
    assert manifest.target.heads == caches
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_bundle_whose_caches_are_equal_says_nothing_of_them(root: Path) -> None:
    assert "caches" not in (root / "manifest.json").read_text()


def test_what_contradicts_the_rest_is_refused(root: Path) -> None:
    target = load_bundle(root).manifest.target
    (heads, size), count = target.heads[0], target.num_layers
    equal = [[heads, size]] * count
    for fields, message in (
        ({"requires": ["states"], "caches": equal}, "requires' must have 'caches'"),
        ({"caches": [*equal, [heads, size]]}, "caches' must have an entry per layer"),
        ({"caches": [[heads + 1, size], *equal[1:]]}, "must begin with num_kv_heads and head_size"),
        ({"caches": [[heads, 1 << 40], *equal[1:]]}, "target.caches' must be at most"),
        ({"caches": [[heads, 0], *equal[1:]]}, "caches.*Expected `int` >= 1"),
        ({"caches": equal, "device_precision": "float32"}, "device_precision' must be empty"),
    ):
        change(root, **fields)
        with pytest.raises(BundleError, match=message):
            load_bundle(root)
        change(root, device_precision="", caches=[])


def test_a_graph_of_other_sizes_is_refused(root: Path) -> None:
    target = load_bundle(root).manifest.target
    wider = [(heads, size + 1) for heads, size in target.heads]
    change(root, caches=wider, head_size=target.head_size + 1)
    with pytest.raises(BundleError, match="the manifest disagrees"):
        open_engine(load_bundle(root), "target")
