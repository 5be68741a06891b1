"""Tables of values that a graph computes from positions alone, read by position.

ONNX Runtime's CPU provider computes cosines, sines and logarithms in packs, and the remainder by other code, so a
value's bits depend on its place in the call. A table has the same bits for a position in every call, and reading it
costs less.

Requires a graph whose positions are the value ``kv_export.POSITIONS_VALUE`` [B, T]. Ensures the same function of
positions below the tables' length, up to rounding. Values that mix positions stay as they are.

Source: ONNX operator Gather-13.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.engines.bundle.limits import TABLE_SUFFIX
from outrider.export.graph.edits import drop_unused, put, take_over
from outrider.export.graph.tracing.kv_export import POSITIONS_VALUE

# Names of tables of biases by the distance of a key from its query end so (``export.graph.stack_tables``).
DISTANCE_SUFFIX = ".by_distance"
_OPSET = 24
_INT64 = onnx.TensorProto.INT64
_PACKED = frozenset({"Cos", "Log", "Sin"})
# Absolute, of values near 1: a wrong row differs by more.
_TOLERANCE = 1e-6


def tabulate_positions(graph: ir.Graph, num_positions: int) -> None:
    """Replace angles and logarithms of positions by a Gather of their values at 0..num_positions - 1."""
    positions = span_positions(graph)
    if positions is None:
        return
    nodes = _computed_from(positions, graph)
    # All before the first is replaced: one may be computed from another.
    tables = [
        (value, _table(value, positions, nodes, num_positions))
        for value in _results(nodes, positions)
    ]
    for value, table in tables:
        if table is not None:
            stored = put(graph, table, f"{value.name}{TABLE_SUFFIX}")
            lookup = ir.node("Gather", [stored, positions], attributes={"axis": 0})
            producer = value.producer()
            assert producer is not None
            graph.insert_before(producer, lookup)
            take_over(value, lookup.outputs[0])
    drop_unused(graph)


def span_positions(graph: ir.Graph) -> ir.Value | None:
    """Return the positions that a graph computes from ``start``, if any."""
    return value_named(graph, POSITIONS_VALUE)


def value_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """Return the value of a name that a node of a graph computes, if any."""
    return next((value for node in graph for value in node.outputs if value.name == name), None)


def is_position_table(name: str | None) -> bool:
    """Return whether a constant is a table of values by position or by distance by its name, not a weight."""
    return name is not None and name.endswith((TABLE_SUFFIX, DISTANCE_SUFFIX))


def _computed_from(positions: ir.Value, graph: ir.Graph) -> list[ir.Node]:
    """Return nodes that read only positions, constants and sizes of the span, in order."""
    known = {id(positions)}
    sized = [value for value in graph.inputs if value.name in (names.TOKENS, names.START)]
    nodes = []
    for node in graph:
        if node is positions.producer():
            continue
        if node.op_type == "Shape":
            is_known = node.inputs[0] in sized or id(node.inputs[0]) in known
        else:
            is_known = all(
                value is None or id(value) in known or value.is_initializer()
                for value in node.inputs
            )
        if is_known:
            known.update(id(value) for value in node.outputs)
            nodes.append(node)
    return nodes


def _results(nodes: list[ir.Node], positions: ir.Value) -> list[ir.Value]:
    """Return values [B, T] or [B, T, width] float32 behind such an operator that other nodes than these read."""
    assert positions.shape is not None
    packed: set[int] = set()
    candidates: dict[int, ir.Value] = {}
    for node in nodes:
        value = node.outputs[0]
        if node.op_type not in _PACKED and not any(id(one) in packed for one in node.inputs):
            continue
        packed.add(id(value))
        shape = value.shape or ir.Shape([])
        has_width = len(shape) == 2 or (len(shape) == 3 and isinstance(shape[2], int))
        is_row = has_width and value.dtype is ir.DataType.FLOAT
        if is_row and list(shape[:2]) == list(positions.shape):
            candidates[id(value)] = value
    return [
        value
        for value in candidates.values()
        if any(id(use.node.outputs[0]) not in candidates for use in value.uses())
    ]


def _table(
    value: ir.Value, positions: ir.Value, nodes: list[ir.Node], num_positions: int
) -> FloatArray | None:
    """Return the value [num_positions] or [num_positions, width] by position; None where it needs other positions."""
    evaluator = ReferenceEvaluator(_part(value, positions, nodes))

    def evaluate(where: IntArray) -> FloatArray:
        sizes = {names.TOKENS: np.zeros_like(where), names.START: where[:, 0]}
        (values,) = cast("list[FloatArray]", evaluator.run(None, {POSITIONS_VALUE: where} | sizes))
        return values

    table: FloatArray = evaluate(np.arange(num_positions)[None])[0]
    few = np.random.default_rng(0).integers(0, num_positions, (3, 4))
    # Also at the first positions alone, to find values that depend on the largest of a call.
    for where in (few, np.arange(num_positions)[None, :4]):
        if not np.allclose(evaluate(where), table[where], rtol=0.0, atol=_TOLERANCE):
            return None
    return table


def _part(value: ir.Value, positions: ir.Value, nodes: list[ir.Node]) -> onnx.ModelProto:
    """Return the model that computes the value [B, T, width] from positions, tokens [B, T] and start [B]."""
    wanted: dict[ir.Value | None, None] = {value: None}
    kept = []
    for node in reversed(nodes):
        if any(one in wanted for one in node.outputs):
            wanted.update(dict.fromkeys(node.inputs))
            kept.append(ir.serde.serialize_node(node))
    assert value.name is not None
    constants = [_stored(one) for one in wanted if one is not None and one.is_initializer()]
    graph = onnx.helper.make_graph(
        kept[::-1],
        "positions",
        [
            *(
                onnx.helper.make_tensor_value_info(name, _INT64, ["b", "t"])
                for name in (POSITIONS_VALUE, names.TOKENS)
            ),
            onnx.helper.make_tensor_value_info(names.START, _INT64, ["b"]),
        ],
        [onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, None)],
        constants,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _OPSET)])


def _stored(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    return onnx.numpy_helper.from_array(value.const_value.numpy(), value.name)
