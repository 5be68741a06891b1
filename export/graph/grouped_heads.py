"""Attention that reads each head of the cache once, where several query heads share it.

ONNX Runtime's CPU kernel multiplies every query head separately, so G query heads of a group read the same cache G
times. Heads of a group are adjacent (query head h reads cache head h // G), so a reshape makes their tokens the rows
of one head, without a copy:

    queries [B, G*H, T, D] -> [B, H, G*T, D]    row g*T + t is token t of the group's head g
    mask    [B, 1, T, S]   -> [B, 1, G*T, S]    T rows, repeated G times

``grouped.onnx`` is ``model.onnx`` edited so, with packed rows (``export.graph.packed_rows``), over the same weights. It
is for the CPU: kernels of accelerators want causal attention by lengths, without a mask. With G*T >= 2 rows no query
is padded; where G is 1 nothing is reshaped, and callers make the rectangle two tokens wide at least.

Positions and the numbers of the cache's columns are inputs: a dozen nodes would compute them, a tenth of a small
model's call. The mask is made once per call, as numbers added to the scores: 0 where seen, else minus infinity. (As
bool, which every layer would convert, a chunk of 256 tokens takes 3 % longer.) It compares float32, which ONNX Runtime
does twice as fast as int64; positions are below 2**24.

Requires Attention on queries [B, G*H, T, D] of known head counts, one G in all layers, and what packing
requires. Ensures the same function of positions start + t.

Source: ONNX operator Attention-24.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import (
    BIAS,
    KEYS,
    QUERIES,
    VALUES,
    AttentionKind,
    attention_kind,
    attention_nodes,
    input_of,
)
from outrider.export.graph.edits import insert_tape, put, put_input
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.packed_rows import declare_rows, pack_rows
from outrider.export.graph.position_tables import span_positions

_HEADS_AXIS, _SIZE_AXIS = 1, 3


def derive_grouped_graph(path: Path) -> bool:
    """Write ``grouped.onnx`` beside the canonical graph at ``path``; return whether that was possible.

    Every Attention node must attend to a cache or a source, with the same group size, and its rows can be packed. Heads
    that share a source, or have biases, are not grouped.
    """
    model = ir.load(path)
    drop_query_padding(model.graph)
    nodes, own = attention_nodes(model.graph), attention_nodes(model.graph, AttentionKind.SELF)
    groups = {_group_size(node) for node in nodes}
    has_biases = any(input_of(node, BIAS) for node in nodes)
    if not own or len(groups) != 1 or 0 in groups:
        return False
    if groups != {1} and (has_biases or len(own) < len(nodes)):
        return False
    if not {*map(attention_kind, nodes)} <= {AttentionKind.SELF, AttentionKind.SOURCE}:
        return False
    positions = give_positions(model.graph)
    give_mask(model.graph, own, _causal_mask(model.graph), is_added=True)
    if not pack_rows(model.graph, nodes, positions):
        return False
    if groups != {1}:
        for node in nodes:
            _group_queries(model.graph, node)
    declare_rows(model.graph)
    RemoveUnusedNodesPass()(model)
    # Weights keep naming the data file of model.onnx: they were never read.
    ir.save(model, path.parent / names.GROUPED_FILE)
    return True


def give_positions(graph: ir.Graph) -> ir.Value:
    """Add positions as an input, and replace those computed from ``start``."""
    positions = put_input(graph, names.POSITIONS, ir.DataType.INT64, ["batch", "tokens"])
    if (found := span_positions(graph)) is not None:
        found.replace_all_uses_with(positions)
    return positions


def give_mask(
    graph: ir.Graph, nodes: list[ir.Node], mask: ir.Value, *, is_added: bool = False
) -> None:
    """Replace causality of nodes over a cache by ``mask`` [B, 1, T, S], bool or, if it ``is_added``, float32.

    A node's bias [B, H, T, S] is added to it, once for all nodes that share the bias.
    """
    masks: dict[ir.Value | None, ir.Value] = {None: mask}
    for node in nodes:
        bias = input_of(node, BIAS)
        if bias is not None and bias not in masks:
            masks[bias] = _biased_mask(graph, bias, mask, before=node, is_added=is_added)
        node.resize_inputs(BIAS + 1)
        node.replace_input_with(BIAS, masks[bias])
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _biased_mask(
    graph: ir.Graph, bias: ir.Value, mask: ir.Value, *, before: ir.Node, is_added: bool
) -> ir.Value:
    """Return the sum of a bias and a mask, made before a node."""
    tape = ir.tape.Tape()
    name = f"{bias.name}.masked"
    added = mask if is_added else _added(graph, tape, mask, name)
    total = tape.op("Add", [bias, added])
    total.type = ir.TensorType(ir.DataType.FLOAT)
    insert_tape(graph, tape, name, before=before)
    return total


def group_heads(graph: ir.Graph) -> None:
    """Make every Attention node under a mask read each head of the cache once, where heads share it."""
    masks: dict[tuple[str | None, int], ir.Value] = {}
    for node in attention_nodes(graph):
        groups, mask = _group_size(node), input_of(node, BIAS)
        if groups < 2 or mask is None or mask.dtype is ir.DataType.FLOAT:
            continue
        key = mask.name, groups
        if key not in masks:
            masks[key] = _repeated_mask(graph, mask, groups)
        _regroup(graph, node, masks[key])


def _group_size(node: ir.Node) -> int:
    """Return query heads per cache head; 0 where the graph does not give heads or their size."""
    queries, keys, values = (node.inputs[index] for index in (QUERIES, KEYS, VALUES))
    assert queries is not None and keys is not None and values is not None
    num_queries, num_keys = _size(queries, _HEADS_AXIS), _size(keys, _HEADS_AXIS)
    if _size(queries, _SIZE_AXIS) is None or _size(values, _SIZE_AXIS) is None:
        return 0
    return 0 if num_queries is None or num_keys is None else num_queries // num_keys


def _size(value: ir.Value, axis: int) -> int | None:
    """Return the size of an axis, if the graph gives it."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def _regroup(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> None:
    """Reshape an Attention node's queries and answers around it."""
    queries, values, answers = node.inputs[0], node.inputs[2], node.outputs[0]
    assert queries is not None and values is not None
    _group_queries(graph, node)
    node.replace_input_with(BIAS, mask)
    apart = _reshape(
        graph, answers, [0, _size(queries, _HEADS_AXIS), -1, _size(values, _SIZE_AXIS)]
    )
    apart.outputs[0].name, answers.name = answers.name, f"{answers.name}.grouped"
    apart.outputs[0].shape, answers.shape = answers.shape, None
    answers.replace_all_uses_with(apart.outputs[0])
    apart.replace_input_with(0, answers)
    graph.insert_after(node, apart)


def _group_queries(graph: ir.Graph, node: ir.Node) -> None:
    """Reshape an Attention node's queries to one head per head of the cache."""
    queries, keys = node.inputs[0], node.inputs[1]
    assert queries is not None and keys is not None
    grouped = _reshape(
        graph, queries, [0, _size(keys, _HEADS_AXIS), -1, _size(queries, _SIZE_AXIS)]
    )
    graph.insert_before(node, grouped)
    node.replace_input_with(0, grouped.outputs[0])


def _reshape(graph: ir.Graph, value: ir.Value, target: list[int | None]) -> ir.Node:
    shape = put(graph, np.array(target, np.int64), f"{value.name}.grouped.shape")
    node = ir.node("Reshape", [value, shape])
    node.outputs[0].name, node.outputs[0].type = f"{value.name}.grouped", value.type
    return node


def _repeated_mask(graph: ir.Graph, mask: ir.Value, groups: int) -> ir.Value:
    """Return [B, 1, G*T, S] float32 of a mask [B, 1, T, S] bool."""
    name = f"{mask.name}.grouped.{groups}"
    repeats = put(graph, np.array([1, 1, groups, 1], np.int64), f"{name}.repeats")
    tape = ir.tape.Tape()
    # Repeated before it is made four times as wide: a long span's mask is large.
    added = _added(graph, tape, tape.op("Tile", [mask, repeats]), name)
    insert_tape(graph, tape, name, after=mask.producer())
    return added


def _causal_mask(graph: ir.Graph) -> ir.Value:
    """Return [B, 1, G*T, S] float32: a token sees the columns up to its position."""
    columns = put_input(graph, names.CACHE_COLUMNS, ir.DataType.FLOAT, ["capacity"])
    positions = put_input(
        graph, names.QUERY_POSITIONS, ir.DataType.FLOAT, ["batch", 1, "queries", 1]
    )
    tape = ir.tape.Tape()
    mask = _added(graph, tape, tape.op("LessOrEqual", [columns, positions]), "causal_mask")
    insert_tape(graph, tape, "causal_mask")
    return mask


def _added(graph: ir.Graph, tape: ir.tape.Tape, mask: ir.Value, name: str) -> ir.Value:
    """Return a mask as numbers to add to scores."""
    seen = put(graph, np.array(0, np.float32), f"{name}.seen")
    unseen = put(graph, np.array(-np.inf, np.float32), f"{name}.unseen")
    return tape.op("Where", [mask, seen, unseen])
