"""Projections of one hidden state, joined into one product: queries, keys and values, or gate and up.

Gates of a delta rule are joined apart: their few columns stay float32 where others are stored as integers.

Requires MatMul nodes that share their left side and have constant right sides [K, N]; biases are constant
[N]. Ensures one product with the weights side by side, and a Split. Where every part is only reshaped to heads and
transposed to [B, H, T, D], both happen once, before the Split.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from outrider.engines.base import FloatArray
from outrider.export.graph.edits import (
    constant,
    constant_tensor,
    gate_columns,
    put,
    put_tensor,
    take_over,
)
from outrider.export.weights.widened import joined

_HEADS_FIRST = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class _Projection:
    """One product and its bias; the graph continues with ``result``."""

    product: ir.Node
    weight: ir.TensorProtocol
    bias: FloatArray | None
    result: ir.Value

    @property
    def num_columns(self) -> int:
        """N of the weight."""
        return self.weight.shape.numpy()[1]


def join_projections(graph: ir.Graph) -> None:
    """Join every set of projections that share their input."""
    groups: dict[tuple[ir.Value, bool], list[_Projection]] = defaultdict(list)
    num_gates = gate_columns(graph)
    for node in graph:
        projection = _projection(node)
        if projection is not None and node.inputs[0] is not None:
            groups[node.inputs[0], projection.num_columns <= num_gates].append(projection)
    for group in groups.values():
        if len(group) > 1:
            _join(graph, group)


def _projection(node: ir.Node) -> _Projection | None:
    if node.op_type != "MatMul":
        return None
    weight, result = constant_tensor(node.inputs[1]), node.outputs[0]
    if weight is None or len(weight.shape) != 2:
        return None
    uses = list(result.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add":
        added = uses[0].node.inputs[1 - uses[0].idx]
        bias = constant(added)
        if bias is not None and bias.shape == (weight.shape[1],):
            return _Projection(node, weight, bias, uses[0].node.outputs[0])
    return _Projection(node, weight, None, result)


def _join(graph: ir.Graph, group: list[_Projection]) -> None:
    at, name = group[0].product, group[0].result.name
    weight = put_tensor(graph, joined([part.weight for part in group], f"{name}.weight"))
    made = [ir.node("MatMul", [at.inputs[0], weight])]
    if any(part.bias is not None for part in group):
        biases = [
            np.zeros(part.num_columns, np.float32) if part.bias is None else part.bias
            for part in group
        ]
        bias = put(graph, np.concatenate(biases), f"{name}.bias")
        made.append(ir.node("Add", [made[0].outputs[0], bias]))
    head_size = _common_head_size(group)
    if head_size is None:
        made.append(_split(graph, made[-1], [part.num_columns for part in group], -1, name))
        results = [part.result for part in group]
    else:
        heads = [part.num_columns // head_size for part in group]
        shape = put(graph, np.array([0, 0, sum(heads), head_size], np.int64), f"{name}.heads")
        made.append(ir.node("Reshape", [made[-1].outputs[0], shape]))
        turn = {"perm": _HEADS_FIRST}
        made.append(ir.node("Transpose", [made[-1].outputs[0]], attributes=turn))
        made.append(_split(graph, made[-1], heads, 1, name))
        results = [_turned(part) for part in group]
    graph.insert_before(at, made)
    for old, new in zip(results, made[-1].outputs, strict=True):
        take_over(old, new)


def _split(
    graph: ir.Graph, node: ir.Node, sizes: list[int], axis: int, name: str | None
) -> ir.Node:
    lengths = put(graph, np.array(sizes, np.int64), f"{name}.sizes")
    return ir.node(
        "Split", [node.outputs[0], lengths], attributes={"axis": axis}, num_outputs=len(sizes)
    )


def _common_head_size(group: list[_Projection]) -> int | None:
    """Return D where each part is only reshaped to [B, T, H, D] and transposed to [B, H, T, D], else None."""
    sizes = {_head_size(part) for part in group}
    return sizes.pop() if len(sizes) == 1 else None


def _head_size(part: _Projection) -> int | None:
    uses = list(part.result.uses())
    if len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return None
    reshape = uses[0].node
    target = constant(reshape.inputs[1])
    following = list(reshape.outputs[0].uses())
    if target is None or target.shape != (4,) or target[:2].tolist() != [0, 0]:
        return None
    if len(following) != 1 or following[0].node.op_type != "Transpose":
        return None
    if tuple(following[0].node.attributes.get_ints("perm", ())) != _HEADS_FIRST:
        return None
    return int(target[3])


def _turned(part: _Projection) -> ir.Value:
    """Return the heads [B, H, T, D] of a projection that has a ``_head_size``."""
    (reshape,) = part.result.uses()
    (transpose,) = reshape.node.outputs[0].uses()
    return transpose.node.outputs[0]
