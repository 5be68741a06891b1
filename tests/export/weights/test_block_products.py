"""Blocks of integers as ONNX Runtime's own operator: the same products, in another layout."""

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from outrider.engines.bundle.names import GROUPED_FILE
from outrider.engines.onnx.session import WeightOptions, open_session
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.certificate.graph_runner import open_graph
from outrider.export.graph.edits import drop_unused
from outrider.export.graph.to_onnx import export_model
from outrider.export.weights.block_products import OPERATOR, name_block_products, save_for_cpu
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.lookup import part_shared_blocks

from scripts.check_parity import random_model
from tests.export.accelerators.tensorrt.test_graph import V, run_graph


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_operator_computes_what_dequantised_products_do(
    tiny_bundle: Path, tmp_path: Path, kind: str
) -> None:
    path = Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target")) / "model.onnx"
    count = quantize_file(path, kind)
    assert_the_operator_is_the_same(path, count, num_constants=2)


def assert_the_operator_is_the_same(
    path: Path, count: int, *, num_constants: int, num_others: int = 0
) -> None:
    """Bit for bit in float32: ONNX Runtime makes the same operator of blocks."""
    model = ir.load(path)
    made = name_block_products(model.graph, ir.DataType.FLOAT)
    drop_unused(model.graph)
    named = path.with_name("named.onnx")
    ir.save(model, named, external_data="named.onnx.data")
    operators = [node.op_type for node in ir.load(named).graph]
    assert len(made) == num_constants * count == num_constants * operators.count("MatMulNBits")
    assert operators.count("MatMul") == num_others
    assert "DequantizeLinear" not in operators
    exact = WeightOptions(exact_blocks=True)
    expected = run_graph(path, open_session(path, copies_caches=True, weights=exact))
    found = run_graph(named)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_cpus_own_graph_has_the_bits_of_the_products_that_onnx_runtime_makes(
    tiny_bundle: Path, tmp_path: Path, kind: str
) -> None:
    """In 8 bits as they are served, and in float32 where they are exact; nothing but blocks is stored again."""
    path = Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target")) / "model.onnx"
    count = quantize_file(path, kind)
    named = path.with_name(GROUPED_FILE)
    save_for_cpu(ir.load(path), named)
    operators = [node.op_type for node in ir.load(named).graph]
    assert (operators.count(OPERATOR), "MatMul" in operators) == (count, False)
    blocks = path.with_name(f"{named.name}.data").stat().st_size
    assert 0 < blocks < path.with_name("model.onnx.data").stat().st_size
    found = {}
    for is_exact in (False, True):
        expected, found[is_exact] = (
            run_graph(one, open_graph(one, exact_blocks=is_exact)) for one in (path, named)
        )
        for name, values in expected.items():
            np.testing.assert_array_equal(found[is_exact][name], values)
    assert not np.array_equal(found[False]["logits"], found[True]["logits"])


def test_a_graph_without_blocks_has_no_file_of_its_own(tiny_bundle: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target")) / "model.onnx"
    quantize_file(path, "int8")
    named = path.with_name(GROUPED_FILE)
    save_for_cpu(ir.load(path), named)
    save_for_cpu(ir.load(tiny_bundle / "target" / "model.onnx"), named)
    assert not path.with_name(f"{named.name}.data").exists()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_head_that_shares_its_blocks_with_the_lookup_of_tokens_has_its_own_names_for_them(
    tmp_path: Path, kind: str
) -> None:
    """Of blocks with two readers ONNX Runtime makes no operator, and its CUDA provider cannot widen them."""
    path = tmp_path / "target" / "model.onnx"
    export_model(random_model("qwen2", 64, vocab_size=V, tie_word_embeddings=True), path)
    quantize_file(path, kind)
    expected = run_graph(path, open_graph(path, exact_blocks=True))
    assert num_shared(path) > 0
    size = path.with_name("model.onnx.data").stat().st_size
    part_shared_blocks(path)
    derive_device_graphs(path, "float16", with_trees=True)
    assert num_shared(path.with_name("device.onnx")) == 0
    assert num_shared(path.with_name("device_tree.onnx")) == 0
    # The same bytes under another name.
    assert path.with_name("device.onnx.data").stat().st_size < 0.05 * size
    device, num_heads = path.with_name("device.onnx"), expected["new_key.0"].shape[1]
    found = run_graph(device, open_graph(device), num_heads=num_heads)
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=6e-2)


def num_shared(path: Path) -> int:
    """Integers of blocks that something else reads too."""
    blocks = [node for node in ir.load(path).graph if node.op_type == "DequantizeLinear"]
    return sum(len(node.inputs[0].uses()) > 1 for node in blocks)
