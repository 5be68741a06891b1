"""Rotary position embedding as one operator, instead of slices and a concatenation.

Requires the half-rotated form x * cos + (-x2 | x1) * sin, whose angles are the same in both halves of the last axis, or
its halves (x1 * cos - x2 * sin | x2 * cos + x1 * sin), wherever these come from.
Ensures RotaryEmbedding on [B, H, T, D] with caches [B, T, D / 2] computed in the graph, so scaling of angles stays.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2; ONNX operator RotaryEmbedding-23.
"""

from __future__ import annotations

import onnx_ir as ir
from outrider.export.graph.edits import commuted, constant, replace, source

_LAST = -1
# Elementwise, so that equal halves stay equal.
_UNARY = ("Cos", "Sin", "Cast")


def fuse_rotary(graph: ir.Graph) -> None:
    """Rewrite every rotation that fits."""
    halves: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "Add":
            _fuse_one(graph, node, halves)
        elif node.op_type == "Concat" and len(node.inputs) == 2:
            _fuse_halves(graph, node)


def _fuse_one(graph: ir.Graph, node: ir.Node, halves: dict[ir.Value, ir.Value]) -> None:
    for straight, turned in commuted(node):
        kept, crossed = source(straight, "Mul"), source(turned, "Mul")
        if kept is None or crossed is None:
            continue
        for value, cosine in commuted(kept):
            for rotated, sine in commuted(crossed):
                if not _is_half_turn(rotated, value):
                    continue
                caches = [_cache(graph, factor, halves) for factor in (cosine, sine)]
                if None in caches:
                    return
                replace(graph, node, ir.node("RotaryEmbedding", [value, *caches]))
                return


def _fuse_halves(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite (x1 * cos - x2 * sin | x2 * cos + x1 * sin), where it fits."""
    less, more = (
        source(value, kind) for value, kind in zip(node.inputs, ("Sub", "Add"), strict=True)
    )
    if less is None or more is None:
        return
    kept, crossed = (source(value, "Mul") for value in less.inputs)
    others = [source(value, "Mul") for value in more.inputs]
    if kept is None or crossed is None or None in others:
        return
    for first, cosine in commuted(kept):
        for second, sine in commuted(crossed):
            wanted = [{second, cosine}, {first, sine}]
            found = [{*other.inputs} for other in others if other is not None]
            caches = [_row(factor) for factor in (cosine, sine)]
            if found not in (wanted, wanted[::-1]) or None in caches:
                continue
            attributes = {"axis": node.attributes.get_int("axis", 0)}
            joined = ir.node("Concat", [first, second], attributes=attributes)
            whole, result = joined.outputs[0], node.outputs[0]
            whole.name, whole.type = f"{result.name}.halves", result.type
            whole.shape = result.shape
            graph.insert_before(node, joined)
            replace(graph, node, ir.node("RotaryEmbedding", [whole, *caches]))
            return


def _is_half_turn(rotated: ir.Value, value: ir.Value) -> bool:
    """Return whether rotated [B, H, T, D] is (-x2 | x1) of the value (x1 | x2)."""
    joined = source(rotated, "Concat")
    if joined is None or value.shape is None or len(value.shape) != 4 or len(joined.inputs) != 2:
        return False
    size = value.shape[_LAST]
    negated = source(joined.inputs[0], "Neg")
    if negated is None or not isinstance(size, int) or size % 2:
        return False
    return (
        joined.attributes.get_int("axis", 0) in (_LAST, 3)
        and _slice_of(negated.inputs[0], value) == (size // 2, size)
        and _slice_of(joined.inputs[1], value) == (0, size // 2)
    )


def _slice_of(part: ir.Value | None, value: ir.Value) -> tuple[int, int] | None:
    """Return begin and end of a slice of value's last axis, else None."""
    node = source(part, "Slice")
    if node is None or node.inputs[0] is not value:
        return None
    numbers = [constant(operand) for operand in node.inputs[1:]]
    if any(number is None or number.size != 1 for number in numbers) or len(numbers) < 3:
        return None
    begin, end, axis, *step = (int(number.reshape(())) for number in numbers if number is not None)
    rank, size = len(value.shape or ()), (value.shape or (0,))[_LAST]
    if axis not in (_LAST, rank - 1) or step not in ([], [1]) or not isinstance(size, int):
        return None
    return begin, min(end, size)


def _cache(graph: ir.Graph, factor: ir.Value, halves: dict[ir.Value, ir.Value]) -> ir.Value | None:
    """Return the first half [B, T, D / 2] of the factor [B, 1, T, D], when its halves are equal."""
    whole = _row(factor)
    return None if whole is None else _half(graph, whole, halves)


def _row(factor: ir.Value) -> ir.Value | None:
    """Return the value [B, T, size] of a factor [B, 1, T, size] of all heads."""
    spread = source(factor, "Unsqueeze")
    axes = constant(spread.inputs[1]) if spread else None
    if spread is None or axes is None or axes.reshape(-1).tolist() != [1]:
        return None
    whole = spread.inputs[0]
    is_row = whole is not None and whole.shape is not None and len(whole.shape) == 3
    return whole if is_row else None


def _half(
    graph: ir.Graph, whole: ir.Value | None, halves: dict[ir.Value, ir.Value]
) -> ir.Value | None:
    """Return the half that the last axis repeats, with later operators moved before the repetition."""
    node = None if whole is None else whole.producer()
    if whole is None or node is None:
        return None
    if whole in halves:
        return halves[whole]
    if node.op_type == "Concat":
        first, *others = node.inputs
        is_repeated = len(others) == 1 and others[0] is first
        last_axis = node.attributes.get_int("axis", 0) in (_LAST, len(whole.shape or ()) - 1)
        return first if is_repeated and last_axis else None
    inner = _half(graph, node.inputs[0], halves) if _is_elementwise(node) else None
    if inner is None:
        return None
    copy = ir.node(node.op_type, [inner, *node.inputs[1:]], attributes=node.attributes)
    made = copy.outputs[0]
    made.name, made.type, made.shape = f"{whole.name}.half", whole.type, inner.shape
    graph.insert_before(node, copy)
    halves[whole] = made
    return made


def _is_elementwise(node: ir.Node) -> bool:
    if node.op_type in _UNARY:
        return True
    if node.op_type != "Mul":
        return False
    factor = constant(node.inputs[1])
    return factor is not None and factor.size == 1
