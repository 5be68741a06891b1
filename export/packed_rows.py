"""Products without padding: tokens of a ragged batch as rows of one sequence, a rectangle in attention alone.

A batch whose spans differ in length is a rectangle [B, T] with padding, and every product with weights pays for it.
Here what flows between attentions is [1, N, hidden], the N tokens of all spans one behind the other. Indices that
the caller makes (``engines.packed_inputs``) lead into attention and out of it:

    [1, N, h*D] -> [N*h, D] -> Gather head_rows.h [B, h, T]       -> [B, h, T, D]     where a Transpose was
    [B, H, G*T, D]          -> GatherND row_heads [1, N, G*H, 3]  -> [1, N, G*H, D]   likewise

so that no node is added: what a Transpose copied is copied by index. Wanted logits are rows of the N too. Angles are
read by position in the node that turns by them.

Requires a graph whose attention nodes take their heads from Reshape and Transpose, possibly through RMSNormalization,
Split and RotaryEmbedding, and whose positions do nothing but turn. Ensures the same function, and no product with
weights over padding.

Source: ONNX operators Gather-13, GatherND-13, RotaryEmbedding-23.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from engines import bundle
from export.graph_edits import constant, put, put_input, replace, source

_HEADS_FIRST = (0, 2, 1, 3)
# Of RotaryEmbedding: the numbers of its inputs.
_COS, _SIN, _PLACES = 1, 2, 3
# Of Attention likewise: keys and values, which TensorScatter writes to the cache.
_CACHES = (1, 2)


def pack_rows(graph: ir.Graph, nodes: Sequence[ir.Node], positions: ir.Value) -> bool:
    """Pack the rows of a graph in which each head of the cache is about to be read once.

    Args:
        graph: rewritten in place, in parts also where it is none that can be.
        nodes: its Attention nodes; the caller groups their queries, so that they answer [B, H, G*T, D], and then
            calls ``declare_rows``.
        positions: [B, T], of the tokens of the rectangle.

    Returns:
        Whether the graph is one that can be.
    """
    entries = _Entries(graph)
    for node in nodes:
        updates = [_update(node.inputs[index]) for index in _CACHES]
        if not all(entries.pack(value) for value in (node.inputs[0], *updates)):
            return False
    if not all(_pack_answers(graph, node) for node in nodes):
        return False
    return _want_rows(graph) and _turn_by_position(graph, positions)


class _Entries:
    """Where packed rows become heads of the rectangle."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rows: dict[int, ir.Value] = {}
        self._packed: set[ir.Node] = set()

    def pack(self, value: ir.Value | None) -> bool:
        """Have what a value [B, h, T, D] is made of come from packed rows; whether that is known how."""
        node = None if value is None else value.producer()
        if node is None or node in self._packed:
            return node is not None
        if node.op_type in ("Split", "RotaryEmbedding", "RMSNormalization"):
            return self.pack(node.inputs[0])
        return node.op_type == "Transpose" and self._pack_heads(node)

    def _pack_heads(self, turned: ir.Node) -> bool:
        split = turned.inputs[0]
        while norm := source(split, "RMSNormalization"):
            split = norm.inputs[0]
        heads = source(split, "Reshape")
        sizes = None if heads is None else constant(heads.inputs[1])
        if heads is None or sizes is None or len(sizes) != 4 or not _puts_heads_first(turned):
            return False
        count, size = int(sizes[2]), int(sizes[3])
        flat = put(self._graph, np.array([-1, size], np.int64), f"{heads.outputs[0].name}.rows")
        heads.replace_input_with(1, flat)
        gathered = ir.node("Gather", [turned.inputs[0], self._rows_of(count)])
        replace(self._graph, turned, gathered)
        self._graph.remove(turned, safe=True)
        self._packed.add(gathered)
        return True

    def _rows_of(self, count: int) -> ir.Value:
        if count not in self._rows:
            name, axes = bundle.head_rows_name(count), ["batch", count, "tokens"]
            self._rows[count] = put_input(self._graph, name, ir.DataType.INT64, axes)
        return self._rows[count]


def _update(cache: ir.Value | None) -> ir.Value | None:
    """What is written to a cache before attention reads it."""
    node = source(cache, "TensorScatter")
    return None if node is None else node.inputs[1]


def _puts_heads_first(node: ir.Node) -> bool:
    return tuple(node.attributes.get_ints("perm", ())) == _HEADS_FIRST


def _pack_answers(graph: ir.Graph, node: ir.Node) -> bool:
    """Gather the real rows of an attention's answers."""
    answers, queries = node.outputs[0], node.inputs[0]
    turned = [use.node for use in answers.uses()]
    if len(turned) != 1 or turned[0].op_type != "Transpose" or not _puts_heads_first(turned[0]):
        return False
    assert queries is not None and queries.shape is not None
    axes = [1, "rows", queries.shape[1], 3]
    rows = next((value for value in graph.inputs if value.name == bundle.ROW_HEADS), None)
    rows = rows or put_input(graph, bundle.ROW_HEADS, ir.DataType.INT64, axes)
    replace(graph, turned[0], ir.node("GatherND", [answers, rows]))
    graph.remove(turned[0], safe=True)
    return True


def _want_rows(graph: ir.Graph) -> bool:
    """Take wanted rows by their number among the packed ones."""
    wanted = next(value for value in graph.inputs if value.name == bundle.LOGIT_POSITIONS)
    found = [
        node
        for node in graph
        if node.op_type == "GatherND"
        and (index := source(node.inputs[1], "Unsqueeze")) is not None
        and index.inputs[0] is wanted
    ]
    for node in found:
        rows = ir.node("Gather", [node.inputs[0], wanted], attributes={"axis": 1})
        replace(graph, node, rows)
        graph.remove(node, safe=True)
    return len(found) == 1


def _turn_by_position(graph: ir.Graph, positions: ir.Value) -> bool:
    """Have RotaryEmbedding read its tables by position, two nodes less; whether positions do nothing else."""
    for use in tuple(positions.uses()):
        table = use.node
        turned = tuple(table.outputs[0].uses())
        if table.op_type != "Gather" or not all(
            user.node.op_type == "RotaryEmbedding" and user.idx in (_COS, _SIN) for user in turned
        ):
            return False
        for user in turned:
            user.node.resize_inputs(_PLACES + 1)
            user.node.replace_input_with(user.idx, table.inputs[0])
            user.node.replace_input_with(_PLACES, positions)
        graph.remove(table, safe=True)
    return True


def declare_rows(graph: ir.Graph) -> None:
    """Shapes of what comes in and goes out; those in between are no longer what they were."""
    shapes: dict[str, list[int | str]] = {
        bundle.TOKENS: [1, "rows"],
        bundle.LOGIT_POSITIONS: ["wanted"],
    }
    for value in graph.inputs:
        if value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
            elif value.name == bundle.LOGITS:
                assert value.shape is not None
                value.shape = ir.Shape([1, "wanted", value.shape[2]])
