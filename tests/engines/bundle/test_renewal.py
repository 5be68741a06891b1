"""What a bundle of an older release would gain by being exported again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.renewal import SERVER, gains_of_export

from tests.engines.bundle.test_manifest import ENTRY, make_manifest


@pytest.fixture
def old(tmp_path: Path) -> Manifest:
    return make_manifest(tmp_path)


def test_a_bundle_in_float32_without_graphs_of_accelerators_gains_nothing(old: Manifest) -> None:
    assert gains_of_export(old) == ()


@pytest.mark.parametrize(("version", "count"), [(None, 4), ("0.2.9", 4), ("0.3.0", 0), ("1.0", 0)])
def test_what_the_export_of_an_older_release_lacks_is_said(
    old: Manifest, version: str | None, count: int
) -> None:
    versions = {} if version is None else {SERVER: version}
    files = {f"target/{name}": object() for name in ("device.onnx", "grouped.onnx")}
    made = replace(
        old,
        target=replace(ENTRY, device_precision="float16"),
        draft=replace(ENTRY, path="draft", weights="int4"),
        files=files,  # type: ignore[arg-type]
        versions=versions,
    )
    gains = gains_of_export(made)
    assert len(gains) == count and all(gain.isprintable() for gain in gains)
    assert len(gains_of_export(replace(made, files={}))) == min(count, 1)
    # In float32 a layer takes 23 launches instead of 24.
    assert len(gains_of_export(replace(made, target=ENTRY))) == max(count - 1, 0)
    # Float32 has no blocks.
    assert len(gains_of_export(replace(made, draft=None))) == max(count - 2, 0)
