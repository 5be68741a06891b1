import json
import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, ModelEntry, write_manifest
from outrider.engines.bundle.manifest_rules import check_manifest
from outrider.engines.bundle.onnx_files import external_data_paths

ENTRY = ModelEntry(
    path="target", num_layers=2, num_kv_heads=2, head_size=4, vocab_size=16, weights="float32"
)


def save_graph(path: Path, location: str) -> None:
    """A model with a constant node and an initializer, both with weights outside the file."""

    def outside(name: str) -> TensorProto:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="offset", value="0")
        tensor.external_data.add(key="location", value=location)
        return tensor

    node = helper.make_node("Constant", [], ["c"], value=outside("inner"))
    graph = helper.make_graph([node], "g", [], [], [outside("weights")])
    path.write_bytes(helper.make_model(graph).SerializeToString())


def make_manifest(root: Path, **changes: object) -> Manifest:
    fields: dict[str, object] = {
        "target": ENTRY,
        "draft": None,
        "max_context": 64,
        "max_batch": 2,
        "max_gamma": 4,
        "max_extend": 8,
        "eos_token_ids": (1, 2),
        "bos_token_id": None,
        "files": hash_files(root),
        "versions": {"onnx": onnx.__version__},
        "certificate": {"max_difference": 1e-7},
    }
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bundle whose graph only declares its weights."""
    root = tmp_path / "bundle"
    (root / "target").mkdir(parents=True)
    save_graph(root / "target" / "model.onnx", "model.onnx.data")
    (root / "target" / "model.onnx.data").write_bytes(bytes(16))
    (root / "tokenizer.json").write_text("{}")
    write_manifest(root, make_manifest(root))
    return root


def test_a_manifest_survives_its_text(root: Path) -> None:
    manifest = make_manifest(root, draft=ENTRY, bos_token_id=0)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_sound_bundle_loads(root: Path) -> None:
    bundle = load_bundle(root)
    assert bundle.manifest == make_manifest(root)
    assert bundle.model_path(bundle.manifest.target) == root / "target" / "model.onnx"


def test_a_bundle_lies_where_its_path_leads(root: Path, tmp_path: Path) -> None:
    (tmp_path / "parent").symlink_to(tmp_path)
    for path in (root / ".." / "bundle", tmp_path / "parent" / "bundle"):
        assert load_bundle(path).root == root


def test_a_changed_byte_is_found(root: Path) -> None:
    (root / "target" / "model.onnx.data").write_bytes(bytes(15) + b"\1")
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: content differs"):
        load_bundle(root)


def test_weights_may_be_hashed_later(root: Path) -> None:
    name = "target/model.onnx.data"
    bundle = load_bundle(root, hashes_weights=False)
    assert list(bundle.unhashed) == [name]
    bundle.check_weights()
    (root / name).write_bytes(bytes(15) + b"\1")
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: changed after it was hashed"):
        bundle.check_unchanged()
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: content differs"):
        load_bundle(root, hashes_weights=False).check_weights()
    (root / name).write_bytes(bytes(17))
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: 17 bytes"):
        load_bundle(root, hashes_weights=False)


def test_weights_that_came_back_before_they_were_hashed_are_refused(root: Path) -> None:
    path = root / "target" / "model.onnx.data"
    declared = path.read_bytes()
    path.write_bytes(bytes(15) + b"\1")
    bundle = load_bundle(root, hashes_weights=False)
    path.write_bytes(declared)
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: changed"):
        bundle.check_weights()


def test_a_changed_size_is_found(root: Path) -> None:
    (root / "tokenizer.json").write_text("{ }")
    with pytest.raises(BundleError, match=r"tokenizer\.json: 3 bytes"):
        load_bundle(root)


def test_what_libraries_open_is_watched_and_what_was_read_is_not(root: Path) -> None:
    bundle = load_bundle(root)
    (root / "tokenizer.json").touch()
    bundle.check_unchanged()
    (root / "target" / "model.onnx.data").touch()
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: changed after it was hashed"):
        bundle.check_unchanged()


def test_a_missing_file_is_named(root: Path) -> None:
    (root / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json: listed .* missing"):
        load_bundle(root)


def test_an_unlisted_file_is_named(root: Path) -> None:
    (root / "extra.bin").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"extra\.bin: not listed"):
        load_bundle(root)


def test_a_symbolic_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (root / "tokenizer.json").unlink()
    (root / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"tokenizer\.json: symbolic links"):
        load_bundle(root)


def test_a_linked_folder_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "target").rename(tmp_path / "moved")
    (root / "target").symlink_to(tmp_path / "moved", target_is_directory=True)
    with pytest.raises(BundleError, match="target: symbolic links"):
        load_bundle(root)


def test_a_hard_link_is_refused(root: Path, tmp_path: Path) -> None:
    os.link(root / "tokenizer.json", tmp_path / "second-name")
    with pytest.raises(BundleError, match=r"tokenizer\.json: hard links"):
        load_bundle(root)


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "target/../../out", "./tokenizer.json"])
def test_a_listed_path_outside_is_refused(root: Path, name: str) -> None:
    files = hash_files(root)
    write_manifest(root, make_manifest(root, files=files | {name: files["tokenizer.json"]}))
    with pytest.raises(BundleError, match="leaves the bundle"):
        load_bundle(root)


@pytest.mark.parametrize("location", ["../../secret", "/etc/passwd", "other.data"])
def test_weights_outside_the_bundle_are_refused(root: Path, location: str) -> None:
    save_graph(root / "target" / "model.onnx", location)
    write_manifest(root, make_manifest(root))
    with pytest.raises(BundleError, match=r"model\.onnx: weights at|leaves the bundle"):
        load_bundle(root)


def test_external_data_is_found_in_nodes_and_in_initializers(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.onnx", tmp_path / "outer.onnx"
    save_graph(inner, "inside")
    model = onnx.load(inner, load_external_data=False)
    model.graph.initializer[0].external_data[1].value = "beside"
    branch = helper.make_node("If", ["x"], ["y"], then_branch=model.graph, else_branch=model.graph)
    outer.write_bytes(
        helper.make_model(helper.make_graph([branch], "g", [], [])).SerializeToString()
    )
    assert external_data_paths(outer) == {"inside", "beside"}


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x3a\xff\x01\x01"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx: (not an ONNX model|empty)"):
        external_data_paths(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_batch", 0, "'max_batch': Expected `int` >= 1"),
        ("max_context", True, "'max_context': Expected `int`, got `bool`"),
        ("eos_token_ids", "1", "'eos_token_ids': Expected `array`, got `str`"),
        ("target", [], "'target': Expected `object`, got `array`"),
        ("schema_version", 4, "export the bundle again"),
        ("schema_version", 2, "'schema_version': expected 1 of a bundle without text2text"),
        ("requires", ["states", "moods"], "requires moods, which this server does not have"),
        ("versions", {"onnx": 1}, r"'versions\[\.\.\.\]': Expected `str`, got `int`"),
    ],
)
def test_a_wrong_field_is_named(root: Path, field: str, value: object, message: str) -> None:
    data = json.loads((root / "manifest.json").read_text())
    data[field] = value
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(json.dumps(data))


def test_a_missing_field_is_named(root: Path) -> None:
    data = json.loads((root / "manifest.json").read_text())
    for name in ("files", "versions", "certificate"):
        text = json.dumps({key: value for key, value in data.items() if key != name})
        with pytest.raises(BundleError, match=f"missing required field `{name}`"):
            Manifest.from_json(text)
    del data["target"]["head_size"]
    with pytest.raises(BundleError, match="'target': Object missing required field `head_size`"):
        Manifest.from_json(json.dumps(data))


def test_a_token_that_stands_for_others_is_one_of_the_models(root: Path) -> None:
    draft = replace(ENTRY, path="draft", parallel_token=16)
    with pytest.raises(BundleError, match=r"'draft\.parallel_token' must be .*15"):
        check_manifest(make_manifest(root, draft=draft))
    assert "parallel_token" not in make_manifest(root).to_json()


def test_a_folder_without_manifest_is_refused(root: Path) -> None:
    (root / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        load_bundle(root)


def test_a_model_that_verifies_trees_has_their_graphs(root: Path) -> None:
    def declare() -> None:
        entry = replace(ENTRY, max_tree_nodes=8)
        write_manifest(root, make_manifest(root, target=entry))

    declare()
    with pytest.raises(BundleError, match=r"target/tree.onnx: the graph of a model is missing"):
        load_bundle(root)
    save_graph(root / "target" / "tree.onnx", "model.onnx.data")
    save_graph(root / "target" / "keep_path.onnx", "elsewhere.data")
    declare()
    with pytest.raises(BundleError, match=r"target/keep_path.onnx: weights at 'elsewhere.data'"):
        load_bundle(root)
    save_graph(root / "target" / "keep_path.onnx", "model.onnx.data")
    declare()
    assert load_bundle(root).manifest.target.max_tree_nodes == 8


def test_a_graph_for_the_cpu_stands_in_where_it_is_listed(root: Path) -> None:
    bundle = load_bundle(root)
    assert bundle.host_path(ENTRY) == bundle.model_path(ENTRY)
    grouped = root / "target" / "grouped.onnx"
    save_graph(grouped, "elsewhere.data")
    with pytest.raises(BundleError, match=r"target/grouped.onnx: not listed"):
        load_bundle(root)
    write_manifest(root, make_manifest(root))
    with pytest.raises(BundleError, match=r"target/grouped.onnx: weights at 'elsewhere.data'"):
        load_bundle(root)
    save_graph(grouped, "model.onnx.data")
    write_manifest(root, make_manifest(root))
    bundle = load_bundle(root)
    assert bundle.host_path(ENTRY) == grouped
    assert bundle.model_path(ENTRY) == root / "target" / "model.onnx"


def test_a_manifest_says_how_narrow_spans_may_be(root: Path) -> None:
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    del data["target"]["narrowest_span"]  # as bundles were whose graphs do not pad attention
    path.write_text(json.dumps(data))
    assert load_bundle(root).manifest.target.narrowest_span == 2
    data["target"]["narrowest_span"] = 1
    path.write_text(json.dumps(data))
    manifest = load_bundle(root).manifest
    assert manifest.target.narrowest_span == 1
    assert json.loads(manifest.to_json()) == data
    for broken, rule in (
        (0, "`int` >= 1"),
        (3, "`int` <= 2"),
        (True, "`int`, got `bool`"),
    ):
        data["target"]["narrowest_span"] = broken
        path.write_text(json.dumps(data))
        with pytest.raises(BundleError, match=f"'target.narrowest_span': Expected {rule}"):
            load_bundle(root)


def test_a_manifest_says_what_accelerators_compute_in(root: Path) -> None:
    def declare(precision: object, *, max_tree_nodes: int = 0) -> None:
        write_manifest(root, make_manifest(root))
        data = json.loads((root / "manifest.json").read_text())
        data["target"] |= {"device_precision": precision, "max_tree_nodes": max_tree_nodes}
        (root / "manifest.json").write_text(json.dumps(data))

    path = root / "manifest.json"
    data = json.loads(path.read_text())
    del data["target"]["device_precision"]  # as bundles were whose graphs take no lengths
    path.write_text(json.dumps(data))
    before = load_bundle(root)
    assert before.why_no_device(before.manifest.target, "9.0").endswith("export the bundle again")
    for broken in ("float8", 16):
        declare(broken)
        with pytest.raises(BundleError, match=r"'target\.device_precision'"):
            load_bundle(root)
    declare("float16")
    with pytest.raises(BundleError, match=r"target/device.onnx: the graph of a model is missing"):
        load_bundle(root)
    for name in ("device.onnx", "device_tree.onnx", "tree.onnx", "keep_path.onnx"):
        save_graph(root / "target" / name, "model.onnx.data")
    declare("float16")
    bundle = load_bundle(root)
    assert bundle.why_no_device(bundle.manifest.target, "9.0") == ""
    declare("float16", max_tree_nodes=8)
    with pytest.raises(BundleError, match=r"target/device_keep_path.onnx: the graph of a model"):
        load_bundle(root)


def test_a_manifest_from_before_there_were_trees_has_none(root: Path) -> None:
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    del data["target"]["max_tree_nodes"]
    path.write_text(json.dumps(data))
    assert load_bundle(root).manifest.target.max_tree_nodes == 0
    data["target"]["max_tree_nodes"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"'target\.max_tree_nodes': Expected `int` >= 0"):
        load_bundle(root)
