"""What a manifest says of recurrent layers: read as written, refused where it contradicts itself or the graph."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import REQUIRES_VERSION, Manifest
from outrider.engines.opening import open_engine

from tests.engines.handmade import write_bundle
from tests.engines.handmade_states import states_entry, write_states_bundle


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_states_bundle(tmp_path / "bundle", states_entry(4))


def change(root: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def of_states(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["target"]["states"].update(values)


def of_target(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["target"].update(values)


def test_sizes_are_read_as_they_were_written(root: Path) -> None:
    manifest = load_bundle(root).manifest
    assert (manifest.target.states, manifest.requires) == (states_entry(4), ("states",))
    assert manifest.schema_version == REQUIRES_VERSION
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_bundle_without_states_says_nothing_of_them(tmp_path: Path) -> None:
    text = (write_bundle(tmp_path / "bundle") / "manifest.json").read_text()
    assert "states" not in text and "requires" not in text


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("requires"), "schema_version"),
        (lambda data: data.update(max_gamma=5), "max_open' must be at least max_gamma"),
        (of_states(mixers=0), "'target.states.mixers': Expected `int` >= 1"),
        (of_states(channels=1 << 25), "states.channels' must be at most"),
        (of_states(heads=0), "must be 0 together with heads, key_size and value_size"),
        (
            of_states(row=0, heads=0, key_size=0, value_size=0, channels=0),
            "a convolution or a scan",
        ),
        (of_target(max_tree_nodes=4), "max_tree_nodes' must be 0"),
        (of_target(device_precision="float32"), "device_precision' must be empty"),
        (of_target(states=None, head_size=0), "head_size' must be >= 1"),
    ],
)
def test_sizes_that_contradict_the_rest_are_refused(
    root: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    change(root, edit)
    with pytest.raises(BundleError, match=message):
        load_bundle(root)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kernel": 5}, r"window.0 is \['batch', 7, 32\], the manifest disagrees"),
        ({"heads": 4}, "state.0 is .* the manifest disagrees"),
        ({"mixers": 3}, "tensors missing or unknown: .*'state.2'"),
    ],
)
def test_a_graph_of_other_sizes_is_refused(root: Path, sizes: dict[str, int], message: str) -> None:
    change(root, of_states(**sizes))
    with pytest.raises(BundleError, match=message):
        open_engine(load_bundle(root), "target")
