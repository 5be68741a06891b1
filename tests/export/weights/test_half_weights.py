import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.base import BundleError, Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.files import list_files
from outrider.engines.opening import open_engine
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.accelerators.tensorrt.graph import derive_graph
from outrider.export.graph.position_tables import is_position_table
from outrider.export.weights.half_weights import HALF_TYPES, store_halves

from tests.export.accelerators.tensorrt.test_graph import CAPACITY, run_graph

# Largest |logit difference| to float32 by rounded weights alone; logits reach 6.
ATOL = {"float16": 2e-2, "bfloat16": 0.2}


@pytest.fixture
def graph(tiny_bundle: Path, tmp_path: Path) -> Path:
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copyfile(tiny_bundle / "target" / name, tmp_path / name)
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(("kind", "atol"), ATOL.items())
def test_halves_take_half_the_file_and_answer_nearly_the_same(
    graph: Path, kind: str, atol: float
) -> None:
    expected, size = run_graph(graph), graph.with_name("model.onnx.data").stat().st_size
    assert store_halves(graph, kind) >= 2 * 4 + 1  # per layer at least QKV, output, up and down
    assert graph.with_name("model.onnx.data").stat().st_size < 0.6 * size
    found = run_graph(graph)
    assert found["logits"].dtype == found["new_key.0"].dtype == np.float32
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=atol)
    assert np.abs(found["logits"] - expected["logits"]).max() > 0


@pytest.mark.parametrize("kind", ATOL)
def test_the_weights_are_the_checkpoints_rounded_once(graph: Path, kind: str) -> None:
    matrices = {
        value.name: onnx.numpy_helper.to_array(value)
        for value in onnx.load(graph).graph.initializer
        if len(value.dims) == 2
    }
    store_halves(graph, kind)
    stored = {value.name: value for value in onnx.load(graph).graph.initializer}
    tables = {name: matrices.pop(name) for name in list(matrices) if is_position_table(name)}
    assert len(tables) == 2
    for name, values in tables.items():
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored[name]), values)
    for name, values in matrices.items():
        found = onnx.numpy_helper.to_array(stored[f"{name}.{kind}"])
        np.testing.assert_array_equal(found, values.astype(HALF_TYPES[kind].numpy()))


def test_a_plan_graph_takes_stored_halves_as_they_are(graph: Path, tmp_path: Path) -> None:
    store_halves(graph, "float16")
    out = tmp_path / "derived.onnx"
    derive_graph(graph, out, capacity=CAPACITY, precision="float16")
    kinds = {
        value.data_type
        for value in onnx.load(out).graph.initializer
        if len(value.dims) == 2 and not is_position_table(value.name)
    }
    assert kinds == {onnx.TensorProto.FLOAT16}
    logits, expected = run_graph(out)["logits"], run_graph(graph)["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=4e-2)


def test_a_graph_for_accelerators_computes_in_halves_over_the_same_weights(graph: Path) -> None:
    store_halves(graph, "float16")
    derive_device_graphs(graph, "float16", with_trees=False)
    half = graph.with_name("device.onnx")
    plain = onnx.load(half, load_external_data=False)
    weights = graph.with_name("model.onnx.data").stat()
    # Everything of size stays where it is; the graph itself and the norms' weights in 16 bits are small.
    norms = graph.with_name("device.onnx.data").stat()
    assert half.stat().st_size + norms.st_size < 0.1 * weights.st_size
    assert sorted(path.name for path in graph.parent.iterdir()) == [
        "device.onnx",
        "device.onnx.data",
        "model.onnx",
        "model.onnx.data",
    ]
    attentions = [node for node in plain.graph.node if node.op_type == "Attention"]
    for node in attentions:
        # Causal by lengths, no mask: what fused kernels want.
        assert [bool(name) for name in node.input] == [True] * 3 + [False] * 3 + [True]
        assert {one.name: one.i for one in node.attribute}["is_causal"] == 1
    assert not any(node.op_type == "Pad" for node in plain.graph.node)
    kinds = {value.name: value.data_type for value in plain.graph.initializer}
    products = [node for node in plain.graph.node if node.op_type in ("MatMul", "Gemm")]
    read = {node.input[1] for node in products} & kinds.keys()
    assert len(read) >= 2 * 4
    assert {kinds[name] for name in read} == {onnx.TensorProto.FLOAT16}
    expected = run_graph(graph)
    found = run_graph(half, num_heads=expected["new_key.0"].shape[1])
    assert found["logits"].dtype == np.float32
    assert found["new_key.0"].dtype == np.float16
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=4e-2)
    assert np.abs(found["logits"] - expected["logits"]).max() > 0


def test_a_weight_beyond_float16_is_refused_by_name(graph: Path) -> None:
    model = onnx.load(graph)
    weight = next(value for value in model.graph.initializer if len(value.dims) == 2)
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0, 0] = -1e5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, graph)
    with pytest.raises(BundleError, match="is beyond the range of float16; use bfloat16"):
        store_halves(graph, "float16")


def test_a_bundle_of_halves_is_certified_and_served_with_its_trees(
    export_small: Callable[..., Bundle],
) -> None:
    bundle = export_small(weights="float16", max_tree_nodes=16)
    assert bundle.manifest.target.weights == "float16"
    judged = bundle.manifest.certificate["target"]["float16"]
    assert 0 < judged["tolerance"] == judged["device"]["tolerance"] < 0.2
    assert 0 < judged["device"]["rollback"]["max_difference"] < judged["tolerance"]
    assert bundle.manifest.target.device_precision == "float16"
    assert "target/device.onnx" in list_files(bundle.root)
    assert 0 < judged["verify"]["max_difference"] < judged["tolerance"]
    engine = open_engine(bundle, "target", with_trees=True)
    chain = Span(slot=0, start=0, tokens=(1, 2, 3), num_logits=3)
    expected = engine.extend([chain])[0, 2].copy()
    tree = Span(slot=0, start=0, tokens=(1, 2, 3, 4), num_logits=4, parents=(0, 1, 0))
    np.testing.assert_allclose(engine.extend([tree])[0, 2], expected, rtol=0, atol=1e-4)
