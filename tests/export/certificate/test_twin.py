"""The twin rounds every 16-bit value, once, and nothing else."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from outrider.engines.base import FloatArray
from outrider.engines.onnx.session import WeightOptions, open_session
from outrider.export.certificate.half_emulation import twin_of

KINDS = {
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
M, K, N = 3, 32, 5


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write_graph(folder: Path, kind: str) -> Path:
    """Two 16-bit products in a row, a sum in float32 between casts, over weights in a file beside it."""
    code, dtype = KINDS[kind]
    rng = np.random.default_rng(0)
    weights = {
        name: onnx.numpy_helper.from_array(rng.normal(size=shape).astype(dtype), name)
        for name, shape in (("first", (K, K)), ("second", (K, N)))
    }
    nodes = [
        helper.make_node("MatMul", ["key.0", "first"], ["product"]),
        helper.make_node("MatMul", ["product", "second"], ["answer"]),
        helper.make_node("Cast", ["answer"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "bias"], ["logits"]),
        helper.make_node("Identity", ["product"], ["new_key.0"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info("key.0", code, [M, K]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, [N]),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [M, N]),
            helper.make_tensor_value_info("new_key.0", code, [M, K]),
        ],
        [*weights.values()],
        value_info=[
            helper.make_tensor_value_info("product", code, [M, K]),
            helper.make_tensor_value_info("answer", code, [M, N]),
        ],
    )
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    return path


def run_twin(path: Path, feeds: dict[str, FloatArray]) -> list[FloatArray]:
    twin = twin_of(path, float32_caches=True)
    assert twin is not None
    weights = WeightOptions(folder=path.parent)
    found: list[FloatArray] = open_session(twin, weights=weights).run(None, feeds)
    return found


def test_every_value_of_16_bits_is_rounded_once(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime drops none of the casts: inputs, products and the sum are NumPy's own, bit for bit."""
    path, dtype = write_graph(tmp_path, kind), KINDS[kind][1]
    graph = onnx.load(path).graph
    first, second = (
        onnx.numpy_helper.to_array(value).astype(np.float32) for value in graph.initializer
    )
    rng = np.random.default_rng(1)
    # Few enough bits that float32 sums exactly, in whatever order; too many for 16 bits.
    given = np.round(rng.normal(size=(M, K)) * 64).astype(np.float32) / 64
    first, second = (np.round(one * 16) / 16 for one in (first, second))
    for value, values in zip(graph.initializer, (first, second), strict=True):
        value.CopyFrom(onnx.numpy_helper.from_array(values.astype(dtype), value.name))
    onnx.save(onnx.helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11
    ), path)  # fmt: skip
    bias = rng.normal(size=N).astype(np.float32)

    def rounded(values: FloatArray) -> FloatArray:
        return values.astype(dtype).astype(np.float32)

    product = rounded(rounded(given) @ first)
    logits, cache = run_twin(path, {"key.0": given, "bias": bias})
    np.testing.assert_array_equal(cache, product)
    np.testing.assert_array_equal(logits, rounded(product @ second) + bias)
    assert np.abs(logits - (given @ first @ second + bias)).max() > 0


def test_what_overflows_16_bits_overflows_in_the_twin(tmp_path: Path) -> None:
    given = {"key.0": np.full((M, K), 6e4, np.float32), "bias": np.zeros(N, np.float32)}
    path = write_graph(tmp_path, "float16")
    assert not np.isfinite(run_twin(path, given)[0]).all()
    path = write_graph(tmp_path, "bfloat16")
    assert np.isfinite(run_twin(path, given)[0]).all()


def test_inputs_outputs_and_weights_are_those_of_the_graph(tmp_path: Path, kind: str) -> None:
    path = write_graph(tmp_path, kind)
    plain = onnx.load(path, load_external_data=False).graph
    twin = twin_of(path)
    assert twin is not None
    graph = onnx.load_from_string(twin).graph
    for found, expected in ((graph.input, plain.input), (graph.output, plain.output)):
        assert [*found] == [*expected]
    assert [*graph.initializer] == [*plain.initializer]
    halves = {
        value.name for value in graph.input if value.type.tensor_type.elem_type == KINDS[kind][0]
    }
    halves |= {value.name for value in graph.initializer}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    halves |= {node.output[0] for node in casts if node.attribute[0].i == KINDS[kind][0]}
    assert len(halves) == 1 + 2 + 3
    for node in graph.node:
        assert (halves & {*node.input} != set()) == (node in casts and node.output[0] not in halves)


def test_a_graph_of_float32_has_no_twin(tiny_bundle: Path) -> None:
    assert twin_of(tiny_bundle / "target" / "model.onnx") is None
