"""Fewer and larger operators for the same function: fusions that undo the exporter's decompositions.

``fuse`` requires a traced float32 graph whose constants are initializers. It ensures the same outputs up to rounding,
from standard ONNX operators. Rewrites match values and constants, never an architecture's names; where a pattern does
not fit, the graph stays as it was.

Source: ONNX operators RMSNormalization-23, RotaryEmbedding-23, GatherND-13.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from outrider.engines.base import FloatArray
from outrider.export.graph.edits import commuted, constant, drop_unused, put, replace, source
from outrider.export.graph.fuse_projections import join_projections
from outrider.export.graph.fuse_rotary import fuse_rotary

_LAST = -1
# Attention's input that is added to the scores.
_BIAS = 3


def fuse(model: ir.Model) -> None:
    """Rewrite a traced graph in place; its inputs, outputs and their names stay."""
    graph = model.graph
    _fold_shapes(graph)
    _fuse_norms(graph)
    fuse_rotary(graph)
    join_projections(graph)
    _gather_columns(graph)
    _drop_zero_biases(graph)
    drop_unused(graph)


def _fold_shapes(graph: ir.Graph) -> None:
    """Make Reshape targets constant where leading symbolic axes are copied and one more at most is inferred.

    What is reshaped and back stays as it was.
    """
    for node in list(graph):
        if node.op_type != "Reshape":
            continue
        value, result = node.inputs[0], node.outputs[0]
        assert value is not None
        if (vector := _same_vector(node)) is not None:
            result.replace_all_uses_with(vector)
            continue
        before = inner.inputs[0] if (inner := source(value, "Reshape")) else None
        if before is not None and _has_shape(before, result.shape):
            result.replace_all_uses_with(before)
            continue
        target = _constant_target(value.shape, result.shape)
        if target is not None and constant(node.inputs[1]) is None:
            shape = put(graph, np.array(target, np.int64), f"{result.name}.shape")
            node.replace_input_with(1, shape)
            node.attributes.pop("allowzero", None)


def _has_shape(value: ir.Value, shape: ir.Shape | None) -> bool:
    """Return whether a value has a shape, of which everything is known."""
    is_known = shape is not None and all(str(size) != "None" for size in shape)
    return is_known and value.shape == shape


def _constant_target(before: ir.Shape | None, after: ir.Shape | None) -> list[int] | None:
    """Return a Reshape's target, 0 for a kept axis; None where more than one axis stays unknown."""
    if before is None or after is None:
        return None
    target: list[int] = []
    for axis, size in enumerate(after):
        is_kept = axis < len(before) and before[axis] == size and axis == len(target)
        if isinstance(size, int):
            target.append(size)
        elif is_kept and str(size) != "None":
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else None


def _same_vector(node: ir.Node) -> ir.Value | None:
    """Return the vector that a Reshape to [-1] restores after Unsqueeze, if that is all it does."""
    target, inner = constant(node.inputs[1]), node.inputs[0]
    while (raised := source(inner, "Unsqueeze")) is not None:
        inner = raised.inputs[0]
    if target is None or target.tolist() != [-1] or inner is None or inner is node.inputs[0]:
        return None
    return inner if inner.shape is not None and len(inner.shape) == 1 else None


def _fuse_norms(graph: ir.Graph) -> None:
    for node in list(graph):
        if node.op_type == "Mul":
            _fuse_norm(graph, node)


def _fuse_norm(graph: ir.Graph, node: ir.Node) -> None:
    """Replace x * rsqrt(mean(x^2) + eps), times a weight and a number if they follow, by RMSNormalization.

    A number is what T5 scales its logits by. Left to itself, ONNX Runtime moves it into a product of some graphs and
    not of others, which then differ in bits.
    """
    for value, scale in commuted(node):
        epsilon = _inverse_rms(scale, value)
        if epsilon is None or value.shape is None:
            continue
        width = value.shape[_LAST]
        if not isinstance(width, int):
            continue
        last, weight = _multiplied(node, (width,))
        if weight is None:
            weight = put(graph, np.ones(width, np.float32), f"{node.outputs[0].name}.ones")
        last, number = _multiplied(last, ())
        if number is not None:
            scaled = _array(weight) * _array(number)
            weight = put(graph, scaled, f"{last.outputs[0].name}.weight")
        fused = ir.node(
            "RMSNormalization",
            [value, weight],
            attributes={"axis": _LAST, "epsilon": epsilon, "stash_type": 1},
        )
        replace(graph, last, fused)
        return


def _multiplied(node: ir.Node, shape: tuple[int, ...]) -> tuple[ir.Node, ir.Value | None]:
    """Return the product of a node's output, where it alone is used, and a constant of this shape, and the constant.

    Without such a product that is the node, and None.
    """
    following = list(node.outputs[0].uses())
    if len(following) == 1 and following[0].node.op_type == "Mul":
        for _, factor in commuted(following[0].node):
            found = constant(factor)
            if found is not None and found.shape == shape:
                return following[0].node, factor
    return node, None


def _array(value: ir.Value) -> FloatArray:
    array = constant(value)
    assert array is not None
    return array.astype(np.float32)


def _inverse_rms(scale: ir.Value | None, value: ir.Value | None) -> float | None:
    """Return epsilon when scale is 1 / sqrt(mean(value^2 over the last axis) + epsilon), else None."""
    inverse = source(scale, "Reciprocal")
    root = source(inverse.inputs[0], "Sqrt") if inverse else None
    total = source(root.inputs[0], "Add") if root else None
    if total is None:
        return None
    for mean_value, added in commuted(total):
        mean, epsilon = source(mean_value, "ReduceMean"), constant(added)
        if mean is None or epsilon is None or epsilon.size != 1:
            continue
        axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
        if axes is None or axes.reshape(-1).tolist() != [_LAST]:
            continue
        if mean.attributes.get_int("keepdims", 1) == 1 and _is_square(mean.inputs[0], value):
            return float(epsilon.reshape(()))
    return None


def _is_square(square: ir.Value | None, value: ir.Value | None) -> bool:
    power = source(square, "Pow")
    if power is not None:
        exponent = constant(power.inputs[1])
        return power.inputs[0] is value and exponent is not None and bool((exponent == 2).all())
    product = source(square, "Mul")
    return product is not None and all(factor is value for factor in product.inputs)


def _drop_zero_biases(graph: ir.Graph) -> None:
    """Attend without a bias where it is a zero, repeated."""
    for node in list(graph):
        if node.op_type == "Attention" and len(node.inputs) > _BIAS:
            spread = source(node.inputs[_BIAS], "Expand")
            value = constant(spread.inputs[0]) if spread else None
            if value is not None and not value.any():
                node.replace_input_with(_BIAS, None)


def _gather_columns(graph: ir.Graph) -> None:
    """Gather whole rows by GatherND, instead of an index per element."""
    for node in list(graph):
        if node.op_type != "GatherElements" or node.attributes.get_int("axis", 0) != 1:
            continue
        spread = source(node.inputs[1], "Expand")
        index = source(spread.inputs[0], "Unsqueeze") if spread else None
        rows = node.inputs[0]
        if index is None or rows is None or len(rows.shape or ()) != 3:
            continue
        axes = constant(index.inputs[1])
        if axes is None or axes.reshape(-1).tolist() not in ([2], [_LAST]):
            continue
        gathered = ir.node("GatherND", [rows, index.outputs[0]], attributes={"batch_dims": 1})
        replace(graph, node, gathered)
