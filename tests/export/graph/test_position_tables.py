"""What follows from positions alone is read from tables; what does not stays, and is refused where it must be."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.onnx.session import open_session
from outrider.export.graph.position_tables import is_position_table, tabulate_positions
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.tracing.kv_export import POSITIONS_VALUE

from scripts.check_parity import random_model

NUM_POSITIONS, WIDTH = 300, 5
ANGLES = """
    column = Unsqueeze(span_positions, last)
    number = Cast <to = 1> (column)
    angles = Mul(number, frequencies)
"""
COSINE = "cosine = Cos(angles) scaled = Mul(cosine, factor) y = Add(x, scaled)"
ANSWER = f"float[batch, tokens, {WIDTH}] y"


def graph_of(body: str) -> ir.Model:
    """Model of x [B, T, WIDTH] float32, tokens [B, T] and start [B] int64, whose positions the body reads."""
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        f"g (float[batch, tokens, {WIDTH}] x, int64[batch, tokens] tokens, int64[batch] start)"
        f" => ({ANSWER}) {{ begin = Unsqueeze(start, last) sum = Add(begin, tokens)"
        f" {POSITIONS_VALUE} = Min(sum, end) {body} }}"
    )
    constants = {
        "last": np.array([-1]),
        "end": np.array(NUM_POSITIONS - 1),
        "zero": np.array([0]),
        "factor": np.array(1.5, np.float32),
        "limit": np.array(100.0, np.float32),
        "frequencies": np.array([1.0, 0.3, 0.1, 0.03, 0.01], np.float32),
    }
    for name, array in constants.items():
        if f"{name})" in body or name in ("last", "end"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))


def answers(model: ir.Model, where: IntArray, path: Path) -> FloatArray:
    """The model's y [B, T, WIDTH] at positions [B, T]."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    x = np.zeros((*where.shape, WIDTH), np.float32)
    feeds = {"x": x, "tokens": where, "start": np.zeros(len(where), np.int64)}
    values: FloatArray = open_session(path).run(None, feeds)[0]
    return values


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (3, 3), (2, 5), (7, 13)])
def test_a_table_answers_alike_and_a_position_has_the_same_bits_everywhere(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    where = np.random.default_rng(1).integers(0, NUM_POSITIONS, shape)
    model = graph_of(ANGLES + COSINE)
    computed = answers(model, where, tmp_path / "computed.onnx")
    tabulate_positions(model.graph, NUM_POSITIONS)
    assert sorted(node.op_type for node in model.graph) == [
        "Add",
        "Add",
        "Gather",
        "Min",
        "Unsqueeze",
    ]
    found = answers(model, where, tmp_path / "read.onnx")
    np.testing.assert_allclose(found, computed, rtol=0, atol=1e-6)
    alone = [
        [answers(model, one.reshape(1, 1), tmp_path / "one.onnx")[0, 0] for one in row]
        for row in where
    ]
    np.testing.assert_array_equal(found, alone)


def test_a_cosine_turned_before_it_is_used_is_tabulated() -> None:
    body = ANGLES + (
        "cosine = Cos(angles) turned = Unsqueeze(cosine, zero)"
        "raised = Unsqueeze(x, zero) product = Mul(raised, turned) y = Squeeze(product, zero)"
    )
    model = graph_of(body)
    tabulate_positions(model.graph, NUM_POSITIONS)
    operators = {node.op_type for node in model.graph}
    assert "Gather" in operators
    assert "Cos" not in operators


def test_a_logarithm_of_a_position_is_tabulated(tmp_path: Path) -> None:
    body = (
        "number = Cast <to = 1> (span_positions) more = Add(number, factor) grown = Log(more)"
        "column = Unsqueeze(grown, last) y = Add(x, column)"
    )
    where = np.random.default_rng(1).integers(0, NUM_POSITIONS, (3, 5))
    model = graph_of(body)
    computed = answers(model, where, tmp_path / "computed.onnx")
    tabulate_positions(model.graph, NUM_POSITIONS)
    assert "Log" not in {node.op_type for node in model.graph}
    found = answers(model, where, tmp_path / "read.onnx")
    np.testing.assert_allclose(found, computed, rtol=0, atol=1e-6)


def test_angles_that_depend_on_the_longest_row_are_computed() -> None:
    body = (
        ANGLES.replace("angles =", "plain =")
        + "most = ReduceMax <keepdims = 0> (number) angles = Div(plain, most)"
        + COSINE
    )
    model = graph_of(body)
    tabulate_positions(model.graph, NUM_POSITIONS)
    assert "Cos" in {node.op_type for node in model.graph}
    assert not any(map(is_position_table, model.graph.initializers))


def test_angles_that_change_with_the_longest_row_are_computed() -> None:
    chosen = (
        "most = ReduceMax <keepdims = 0> (number) is_long = Greater(most, limit)"
        "slower = Div(frequencies, factor) chosen = Where(is_long, slower, frequencies)"
    )
    angles = ANGLES.replace(
        "angles = Mul(number, frequencies)", f"{chosen} angles = Mul(number, chosen)"
    )
    model = graph_of(angles + COSINE)
    tabulate_positions(model.graph, NUM_POSITIONS)
    assert "Cos" in {node.op_type for node in model.graph}


def test_cosines_of_the_text_are_computed() -> None:
    model = graph_of("cosine = Cos(x) y = Add(x, cosine)")
    tabulate_positions(model.graph, NUM_POSITIONS)
    assert "Cos" in {node.op_type for node in model.graph}


def test_an_operator_that_rounds_by_its_place_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model("llama", num_positions=64, hidden_act="mish", num_hidden_layers=1)
    with pytest.raises(BundleError, match=r"operators \['Mish'\] round by an element's place"):
        export_model(model, tmp_path / "model.onnx")


def test_tables_without_a_limit_are_refused(tmp_path: Path) -> None:
    model = random_model("llama", num_positions=1 << 21)
    with pytest.raises(BundleError, match="num_positions: 2097152 are too many"):
        export_model(model, tmp_path / "model.onnx")


def test_tables_end_where_the_positions_of_a_call_end(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = random_model("llama", num_positions=1 << 21, num_hidden_layers=1)
    export_model(model, path, num_positions=48)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    assert [list(one.dims) for one in stored if is_position_table(one.name)] == [[48, 8]] * 2
