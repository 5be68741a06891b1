"""Attention that reads each head of the cache once, where several query heads share it.

ONNX Runtime's CPU kernel multiplies every query head separately, so G query heads of a group read the same cache G
times. Heads of a group are adjacent (query head h reads cache head h // G), so a reshape makes their tokens the rows
of one head, without a copy:

    queries [B, G*H, T, D] -> [B, H, G*T, D]    row g*T + t is token t of the group's head g
    mask    [B, 1, T, S]   -> [B, 1, G*T, S]    T rows, repeated G times

``grouped.onnx`` is ``model.onnx`` edited so, with packed rows (``export.graph.packed_rows``), over the same weights,
and names its products with integer blocks (``export.weights.block_products``). It is for the CPU: kernels of
accelerators want causal attention by lengths, without a mask. With G*T >= 2 rows no query is padded; where G is 1
nothing is reshaped, and callers make the rectangle two tokens wide at least.

Long spans read the cache for many tokens at once, and gain nothing by sharing it. Threads take a head each, so groups
leave some idle where there are fewer than threads, or not a multiple. Queries get as many rows a head as their
positions have, so that the caller chooses: G*T, or T with heads as they were, in the same bits.

Positions and the numbers of the cache's columns are inputs: a dozen nodes would compute them, a tenth of a small
model's call. The mask is made once per call, as numbers added to the scores: 0 where seen, else minus infinity. (As
bool, which every layer would convert, a chunk of 256 tokens takes 3 % longer.) It compares float32, which ONNX Runtime
does twice as fast as int64; positions are below 2**24. Layers with a sliding window have a mask of their own, one for
all that have the same.

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
    gives_scores,
    input_of,
)
from outrider.export.graph.edits import Axis, insert_tape, put, put_input
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.packed_rows import declare_rows, pack_rows
from outrider.export.graph.position_tables import span_positions
from outrider.export.graph.rings import keep_rings
from outrider.export.graph.windows import seen_in_window, window_of
from outrider.export.weights.block_products import save_for_cpu

_HEADS_AXIS, _SIZE_AXIS = 1, 3


def derive_grouped_graph(path: Path, *, has_rings: bool = False) -> bool:
    """Write ``grouped.onnx`` beside the canonical graph at ``path``; return whether that was possible.

    Every Attention node must attend to a cache or a source, with the same group size, and its rows can be packed. Heads
    that share a source, or have biases other than windows, are not grouped, nor those with sinks. Where it
    ``has_rings``, layers with a window keep rings (``export.graph.rings``).
    """
    model = ir.load(path)
    drop_query_padding(model.graph)
    nodes, own = attention_nodes(model.graph), attention_nodes(model.graph, AttentionKind.SELF)
    groups = {_group_size(node) for node in nodes}
    has_biases = any(
        bias is not None and seen_in_window(bias) is None
        for bias in (input_of(node, BIAS) for node in nodes)
    )
    if not own or len(groups) != 1 or 0 in groups:
        return False
    if groups != {1} and (has_biases or len(own) < len(nodes)):
        return False
    if not {*map(attention_kind, nodes)} <= {AttentionKind.SELF, AttentionKind.SOURCE}:
        return False
    positions = give_positions(model.graph)
    columns, places = _put_places(model.graph)
    if has_rings:
        own = keep_rings(model.graph, own, places)
    _compare_columns(model.graph, own, columns, places)
    give_mask(model.graph, own, _causal_mask(model.graph, columns, places), is_added=True)
    if not pack_rows(model.graph, nodes, positions):
        return False
    if groups != {1}:
        for node in nodes:
            _group_queries(model.graph, node, places)
    declare_rows(model.graph)
    RemoveUnusedNodesPass()(model)
    # Weights keep naming the data file of model.onnx: they were never read.
    save_for_cpu(model, path.parent / names.GROUPED_FILE)
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

    A node's bias [B, H, T, S] is added to it, once for all nodes that share the bias; a window hides more of it.
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
    """Return the sum of a bias and a mask, or what of a mask a window leaves, made before a node."""
    tape = ir.tape.Tape()
    name = f"{bias.name}.masked"
    seen = seen_in_window(bias)
    if seen is None:
        masked = tape.op("Add", [bias, mask if is_added else _added(graph, tape, mask, name)])
    elif is_added:
        unseen = put(graph, np.array(-np.inf, np.float32), f"{name}.unseen")
        masked = tape.op("Where", [seen, mask, unseen])
    else:
        masked = tape.op("And", [seen, mask])
    is_bool = seen is not None and not is_added
    masked.type = ir.TensorType(ir.DataType.BOOL if is_bool else ir.DataType.FLOAT)
    insert_tape(graph, tape, name, before=before)
    return masked


def group_heads(graph: ir.Graph) -> None:
    """Make every Attention node under a mask read each head of the cache once, where heads share it.

    Heads with sinks stay apart: each has its own.
    """
    masks: dict[tuple[str | None, int], ir.Value] = {}
    for node in attention_nodes(graph):
        groups, mask = _group_size(node), input_of(node, BIAS)
        if groups < 2 or mask is None or mask.dtype is ir.DataType.FLOAT or gives_scores(node):
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


def _group_queries(graph: ir.Graph, node: ir.Node, places: ir.Value | None = None) -> None:
    """Reshape an Attention node's queries to one head per head of the cache, or to heads of as many rows as places."""
    queries, keys = node.inputs[0], node.inputs[1]
    assert queries is not None and keys is not None
    size = _size(queries, _SIZE_AXIS)
    if places is None:
        grouped = _reshape(graph, queries, [0, _size(keys, _HEADS_AXIS), -1, size])
    else:
        grouped = _reshape(graph, queries, _rows_of_heads(graph, places, size))
    graph.insert_before(node, grouped)
    node.replace_input_with(0, grouped.outputs[0])


def _rows_of_heads(graph: ir.Graph, places: ir.Value, size: int | None) -> ir.Value:
    """Return the shape of queries whose heads have as many rows as ``places`` [B, 1, rows, 1], once for all nodes."""
    name = f"rows_of_heads.{size}"
    for node in graph:
        if node.name == name:
            return node.outputs[0]
    heads, width = (
        put(graph, np.array(sizes, np.int64), f"{name}.{part}")
        for part, sizes in {"heads": [0, -1], "size": [size]}.items()
    )
    tape = ir.tape.Tape()
    rows = tape.op("Shape", [places], attributes={"start": 2, "end": 3})
    target = tape.op("Concat", [heads, rows, width], attributes={"axis": 0}, name=name)
    insert_tape(graph, tape, name)
    return target


def _reshape(graph: ir.Graph, value: ir.Value, target: ir.Value | list[int | None]) -> ir.Node:
    if not isinstance(target, ir.Value):
        target = put(graph, np.array(target, np.int64), f"{value.name}.grouped.shape")
    node = ir.node("Reshape", [value, target])
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


def _put_places(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """Add the inputs that masks are made of, float32: numbers of columns [S], positions of queries [B, 1, rows, 1]."""
    columns = put_input(graph, names.CACHE_COLUMNS, ir.DataType.FLOAT, ["capacity"])
    axes: list[Axis] = ["batch", 1, names.EITHER_ROWS, 1]
    return columns, put_input(graph, names.QUERY_POSITIONS, ir.DataType.FLOAT, axes)


def _causal_mask(graph: ir.Graph, columns: ir.Value, places: ir.Value) -> ir.Value:
    """Return [B, 1, G*T, S] float32: a token sees the columns up to its position."""
    tape = ir.tape.Tape()
    mask = _added(graph, tape, tape.op("LessOrEqual", [columns, places]), "causal_mask")
    insert_tape(graph, tape, "causal_mask")
    return mask


def _compare_columns(
    graph: ir.Graph, nodes: list[ir.Node], columns: ir.Value, places: ir.Value
) -> None:
    """Let windows compare the positions of queries [B, 1, G*T, 1] with columns, as the causal mask does."""
    for bias in dict.fromkeys(input_of(node, BIAS) for node in nodes):
        seen = seen_in_window(bias)
        if bias is None or seen is None:
            continue
        name, tape = f"{bias.name}.by_column", ir.tape.Tape()
        window = put(graph, np.array(window_of(bias), np.float32), f"{name}.window")
        is_seen = tape.op("Greater", [columns, tape.op("Sub", [places, window])])
        insert_tape(graph, tape, name)
        seen.replace_all_uses_with(is_seen)


def _added(graph: ir.Graph, tape: ir.tape.Tape, mask: ir.Value, name: str) -> ir.Value:
    """Return a mask as numbers to add to scores."""
    seen = put(graph, np.array(0, np.float32), f"{name}.seen")
    unseen = put(graph, np.array(-np.inf, np.float32), f"{name}.unseen")
    return tape.op("Where", [mask, seen, unseen])
