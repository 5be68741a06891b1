"""What a manifest says of rings: read as written, refused where it contradicts itself or by a server without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import BundleError, Span
from outrider.engines.bundle import manifest as manifest_module
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import Manifest, ring_columns, write_manifest
from outrider.engines.memory.room import fit_memory
from outrider.engines.memory.sizes import size_words
from outrider.engines.opening import open_engine

from tests.engines.onnx.handmade_rings import (
    LEAST_COLUMNS,
    MAX_EXTEND,
    MAX_OPEN,
    WINDOW,
    write_rings_bundle,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rings_bundle(tmp_path_factory.mktemp("rings") / "bundle")


def test_rings_are_read_as_they_were_written(root: Path) -> None:
    manifest = load_bundle(root).manifest
    assert manifest.requires == ("rings",)
    assert manifest.target.ring_columns == (LEAST_COLUMNS, 0)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert load_bundle(root).limits(manifest.target).max_open == MAX_OPEN


def test_a_bundle_without_rings_says_nothing_of_them(tmp_path: Path) -> None:
    root = write_rings_bundle(tmp_path / "bundle", columns=0)
    assert "rings" not in (root / "manifest.json").read_text()


def test_a_server_without_rings_refuses_in_a_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "FEATURES", frozenset({"states", "caches"}))
    with pytest.raises(BundleError, match=r"requires rings, which this server does not have"):
        load_bundle(root)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"columns": LEAST_COLUMNS - 1},
            "rings.columns' must hold window, max_extend and max_gamma",
        ),
        ({"columns": 1 << 40}, "rings.columns' must be at most"),
        ({"layers": (0, 2)}, "rings.layers' must ascend, each below num_layers"),
        ({"layers": (1, 0)}, "rings.layers' must ascend"),
        ({"layers": ()}, "rings.layers' must ascend"),
    ],
)
def test_rings_that_contradict_the_rest_are_refused(
    root: Path, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    manifest = load_bundle(root).manifest
    assert manifest.target.rings is not None
    rings = replace(manifest.target.rings, **fields)
    target = replace(manifest.target, rings=rings)
    write_manifest(tmp_path, replace(manifest, target=target))
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requires": ()}, "requires' must have 'rings'"),
        ({"max_tree_nodes": 4}, "max_tree_nodes' must be 0 of a model with rings"),
    ],
)
def test_what_rings_rule_out_is_refused(
    root: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    manifest = load_bundle(root).manifest
    if "requires" in changes:
        manifest = replace(manifest, requires=("states",))
    else:
        manifest = replace(manifest, target=replace(manifest.target, **changes))
    write_manifest(tmp_path, manifest)
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path)


def test_a_bundle_with_rings_has_a_graph_over_them(tmp_path: Path) -> None:
    root = write_rings_bundle(tmp_path / "bundle")
    manifest = load_bundle(root).manifest
    (root / "target" / "grouped.onnx").unlink()
    files = {name: one for name, one in manifest.files.items() if "grouped" not in name}
    write_manifest(root, replace(manifest, files=files))
    with pytest.raises(BundleError, match=r"a model with rings has grouped\.onnx or rings\.onnx"):
        load_bundle(root)


def test_columns_hold_the_window_and_what_may_be_open_beside_the_widest_call() -> None:
    assert ring_columns(512, 8, 512) == 1088
    assert ring_columns(512, 57, 512) == 1088
    assert ring_columns(512, 58, 512) == 1088
    assert ring_columns(WINDOW, 66 - WINDOW - MAX_EXTEND, MAX_EXTEND) == 128


def test_a_slot_is_told_what_its_rings_take(root: Path) -> None:
    """They do not grow: of two equal layers one is as large however long its text is."""
    bundle = load_bundle(root)
    (heads, size), _ = bundle.manifest.target.heads
    of_token = 2 * heads * size * 4
    engine = open_engine(bundle, "target")
    assert (engine.token_bytes, engine.state_bytes) == (of_token, (WINDOW - 1) * of_token)
    engine.extend([Span(slot=0, start=0, tokens=(1, 2), num_logits=0, num_settled=2)])
    assert engine.read_state(0).values.nbytes == 2 * of_token
    room = 2 * 3 * (1024 * of_token + LEAST_COLUMNS * of_token)
    wide = replace(bundle, manifest=replace(bundle.manifest, max_context=1 << 14))
    weights = sum(one.size for name, one in wide.manifest.files.items() if name.endswith(".data"))
    found, why = fit_memory(wide, max_running=3, memory_bytes=room + weights)
    assert (found.manifest.max_batch, found.manifest.max_context) == (3, 1024)
    assert "of it for states and rings, which do not grow" in why


def test_a_ring_takes_no_more_than_the_context_and_accelerators_have_none(root: Path) -> None:
    bundle = load_bundle(root)
    (heads, size), _ = bundle.manifest.target.heads
    # Of three slots of both layers; the ring is wider than the context.
    of_layers = 3 * 2 * 2 * heads * size * 4
    wide = replace(bundle, manifest=replace(bundle.manifest, max_context=1 << 14))
    for context, has_rings in ((LEAST_COLUMNS - 1, True), (1 << 14, False)):
        found, why = fit_memory(wide, max_running=3, max_context=context, has_rings=has_rings)
        assert found.manifest.max_context == context
        assert f": {size_words(context * of_layers)} of memory where all are full" in why
        assert "rings" not in why
