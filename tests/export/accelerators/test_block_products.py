"""Blocks of integers as ONNX Runtime's own operator: the same products, in another layout."""

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from outrider.engines.onnx.session import WeightOptions, open_session
from outrider.export.accelerators.block_products import name_block_products
from outrider.export.graph.edits import drop_unused
from outrider.export.weights.blocks import quantize_file

from tests.export.accelerators.tensorrt.test_graph import run_graph


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
