"""Every rewrite keeps the function, happens where it should, and leaves what only looks alike."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from outrider.engines.base import FloatArray
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.onnx.session import open_session
from outrider.export.graph.fuse import fuse
from outrider.export.weights.blocks import quantize_file

from tests.engines.contract import extend_one, make_tokens, span, wanted_logits

Operators = Callable[[str, str], Counter[str]]
WIDTH, HEADS, HEAD_SIZE = 24, 3, 8
NORM = """
    square = Pow(x, two)
    mean = ReduceMean <keepdims = 1> (square, last)
    total = Add(mean, epsilon)
    root = Sqrt(total)
    inverse = Reciprocal(root)
    scaled = Mul(x, inverse)
"""
HEADS_OF_X = """
    parts = Reshape(x, heads)
    turned = Transpose <perm = [0, 2, 1, 3]> (parts)
"""
ROTARY = """
    low = Slice(turned, zero, half, last)
    high = Slice(turned, half, end, last)
    negated = Neg(high)
    rotated = Concat <axis = -1> (negated, low)
    cosine = Unsqueeze(cos, one)
    sine = Unsqueeze(sin, one)
    kept = Mul(turned, cosine)
    crossed = Mul(sine, rotated)
    y = Add(kept, crossed)
"""
ANGLES = """
    both = Concat <axis = -1> (angles, angles)
    whole = Cos(both)
    cos = Mul(whole, factor)
    sin = Sin(both)
"""
QUERIES_KEYS = """
    q = MatMul(x, wide)
    qb = Add(q, wide_bias)
    k = MatMul(x, narrow)
"""


def constants() -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]:
    random = np.random.default_rng(3)
    return {
        "two": np.array(2, np.float32),
        "three": np.array(3, np.float32),
        "epsilon": np.array(1e-2, np.float32),
        "factor": np.array(1.5, np.float32),
        "weight": random.standard_normal(WIDTH).astype(np.float32),
        "wide": random.standard_normal((WIDTH, 32)).astype(np.float32),
        "wide_bias": random.standard_normal(32).astype(np.float32),
        "narrow": random.standard_normal((WIDTH, 16)).astype(np.float32),
        "zero": np.array([0]),
        "one": np.array([1]),
        "last": np.array([-1]),
        "half": np.array([HEAD_SIZE // 2]),
        "quarter": np.array([HEAD_SIZE // 4]),
        "end": np.array([1 << 40]),
        "heads": np.array([0, 0, HEADS, HEAD_SIZE]),
        "q_heads": np.array([0, 0, 4, 8]),
        "k_heads": np.array([0, 0, 2, 8]),
    }


def graph_of(body: str, outputs: str) -> ir.Model:
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        f"g (float[batch, tokens, {WIDTH}] x, float[batch, tokens, 4] angles,"
        f" float[batch, tokens, {WIDTH}] z) => ({outputs}) {{ {body} }}"
    )
    for name, array in constants().items():
        if f"{name}," in body or f"{name})" in body:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))


def answers(model: ir.Model, path: Path) -> list[FloatArray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    random = np.random.default_rng(4)
    feeds = {
        name: random.standard_normal((2, 3, width)).astype(np.float32)
        for name, width in (("x", WIDTH), ("angles", 4), ("z", WIDTH))
    }
    session = open_session(path)
    inputs = {tensor.name for tensor in session.get_inputs()}
    outputs: list[FloatArray] = session.run(
        None, {name: values for name, values in feeds.items() if name in inputs}
    )
    return outputs


@pytest.fixture
def operators_after(tmp_path: Path) -> Operators:
    """Operators of a rewritten graph, after its answers were held against the original's."""
    return lambda body, outputs: _operators_after(body, outputs, tmp_path / "graph.onnx")


def _operators_after(body: str, outputs: str, path: Path) -> Counter[str]:
    model = graph_of(body, outputs)
    names = [value.name for value in model.graph.outputs]
    before = answers(model, path)
    fuse(model)
    assert [value.name for value in model.graph.outputs] == names
    for found, expected in zip(answers(model, path), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    return Counter(node.op_type for node in model.graph)


Y3 = f"float[batch, tokens, {WIDTH}] y"
Y4 = f"float[batch, {HEADS}, tokens, {HEAD_SIZE}] y"


def test_a_norm_becomes_one_operator_with_its_weight(operators_after: Operators) -> None:
    assert operators_after(NORM + "y = Mul(weight, scaled)", Y3) == {"RMSNormalization": 1}


def test_a_norm_whose_result_is_used_twice_keeps_its_weight_outside(
    operators_after: Operators,
) -> None:
    body = NORM + "weighted = Mul(weight, scaled) y = Add(weighted, scaled)"
    assert operators_after(body, Y3) == {"RMSNormalization": 1, "Mul": 1, "Add": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Pow(x, two)", "Pow(x, three)"),
        ("Pow(x, two)", "Pow(z, two)"),
        ("ReduceMean <keepdims = 1> (square, last)", "ReduceMean <keepdims = 1> (square, one)"),
        ("Mul(x, inverse)", "Mul(z, inverse)"),
        ("Add(mean, epsilon)", "Add(mean, weight)"),
    ],
)
def test_what_is_no_norm_stays(operators_after: Operators, old: str, new: str) -> None:
    assert old in NORM
    body = NORM.replace(old, new) + "y = Mul(weight, scaled)"
    assert "RMSNormalization" not in operators_after(body, Y3)


def test_a_rotation_becomes_one_operator_and_keeps_its_scaled_angles(
    operators_after: Operators,
) -> None:
    assert operators_after(HEADS_OF_X + ANGLES + ROTARY, Y4) == {
        "RotaryEmbedding": 1, "Reshape": 1, "Transpose": 1, "Cos": 1, "Sin": 1, "Mul": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Concat <axis = -1> (negated, low)", "Concat <axis = -1> (low, negated)"),
        ("Neg(high)", "Abs(high)"),
        ("Concat <axis = -1> (angles, angles)", "Concat <axis = -1> (angles, doubled)"),
        (
            "low = Slice(turned, zero, half, last)\n    high = Slice(turned, half, end, last)",
            "low = Slice(turned, quarter, end, last) high = Slice(turned, zero, quarter, last)",
        ),
        ("Mul(turned, cosine)", "Mul(rotated, cosine)"),
    ],
)
def test_what_is_no_rotation_stays(operators_after: Operators, old: str, new: str) -> None:
    body = "doubled = Add(angles, angles)" + HEADS_OF_X + ANGLES + ROTARY
    assert old in body
    assert "RotaryEmbedding" not in operators_after(body.replace(old, new), Y4)


def test_projections_of_one_input_become_one_product(operators_after: Operators) -> None:
    outputs = "float[batch, tokens, 32] qb, float[batch, tokens, 16] k"
    assert operators_after(QUERIES_KEYS, outputs) == {"MatMul": 1, "Add": 1, "Split": 1}


def test_heads_are_cut_and_turned_once(operators_after: Operators) -> None:
    body = QUERIES_KEYS + (
        "qr = Reshape(qb, q_heads) qt = Transpose <perm = [0, 2, 1, 3]> (qr)"
        "kr = Reshape(k, k_heads) kt = Transpose <perm = [0, 2, 1, 3]> (kr)"
        "a = Neg(qt) b = Neg(kt)"
    )
    outputs = "float[batch, 4, tokens, 8] a, float[batch, 2, tokens, 8] b"
    assert operators_after(body, outputs) == {
        "MatMul": 1, "Add": 1, "Reshape": 1, "Transpose": 1, "Split": 1, "Neg": 2,
    }  # fmt: skip


def test_heads_of_which_one_is_used_otherwise_are_cut_apart(operators_after: Operators) -> None:
    body = QUERIES_KEYS + (
        "qr = Reshape(qb, q_heads) qt = Transpose <perm = [0, 2, 1, 3]> (qr)"
        "kr = Reshape(k, k_heads) b = Neg(kr) a = Neg(qt)"
    )
    outputs = "float[batch, 4, tokens, 8] a, float[batch, tokens, 2, 8] b"
    assert operators_after(body, outputs)["Reshape"] == 2


def test_projections_of_different_inputs_stay_apart(operators_after: Operators) -> None:
    body = "q = MatMul(x, wide) k = MatMul(z, narrow)"
    outputs = "float[batch, tokens, 32] q, float[batch, tokens, 16] k"
    assert operators_after(body, outputs) == {"MatMul": 2}


def test_an_exported_llama_has_no_decomposed_part_left(tiny_bundle: Path) -> None:
    path = tiny_bundle / "target" / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    layers = 2
    counts = Counter(node.op_type for node in graph.node)
    assert counts["RMSNormalization"] == counts["RotaryEmbedding"] + 1 == 2 * layers + 1
    assert counts["MatMul"] == 4 * layers + 1  # queries, keys and values; output; gate and up; down
    assert counts["Transpose"] == 2 * layers  # before and after attention
    assert not {"Pow", "Neg", "Expand", "GatherElements"} & counts.keys()
    # Of the padding of single queries; a rotation taken apart has more of both.
    assert (counts["Slice"], counts["Concat"]) == (counts["Attention"], 1)
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}


@pytest.mark.parametrize("num_tokens", [2, 3, 5, 9])
def test_the_rows_of_a_fused_graph_have_the_same_bits_in_every_shape(
    tiny_bundle: Path, num_tokens: int
) -> None:
    bundle = load_bundle(tiny_bundle)
    engine = OnnxEngine(bundle, bundle.manifest.target)
    rows = [make_tokens(engine, 60, seed=row) for row in range(4)]
    expected = [
        np.concatenate([extend_one(engine, 0, at, row[at : at + 30]) for at in (0, 30)])
        for row in rows
    ]
    for batch in (1, 2, 4):
        for at in range(0, 60, num_tokens):
            spans = [span(row, at, rows[row][at : at + num_tokens]) for row in range(batch)]
            for row, found in enumerate(wanted_logits(engine, spans)):
                np.testing.assert_array_equal(found, expected[row][at : at + num_tokens])


def test_block_weights_reach_the_8_bit_kernel(
    tiny_bundle: Path, tmp_path: Path, optimised_graph: Callable[[Path], onnx.GraphProto]
) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes((tiny_bundle / "target" / name).read_bytes())
    count = quantize_file(tmp_path / "model.onnx", "int8")
    levels = [
        attribute.i
        for node in optimised_graph(tmp_path / "model.onnx").node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    ]
    assert levels == [4] * count
