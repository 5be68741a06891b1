"""Products without padding: a ragged batch as rows of one sequence, a rectangle only inside attention.

A batch whose spans differ in length is a rectangle [B, T] with padding, which every product with weights computes.
Here values between attentions are [1, N, hidden], the N tokens of all spans one behind the other. Indices from the
caller (``engines.onnx.packed_inputs``) map them to the rectangle of attention and back:

    [1, N, h*D] -> [N*h, D] -> Gather head_rows.h [B, h, T]       -> [B, h, T, D]     where a Transpose was
    [B, H, G*T, D]          -> GatherND row_heads [1, N, G*H, 3]  -> [1, N, G*H, D]   where a Transpose was

No node is added: indices copy instead of a Transpose. Behind the last attention only rows with wanted logits go on, by
``wanted_heads`` and ``logit_positions``: a chunk of a prompt, which wants one, takes a seventh less on five layers.
RotaryEmbedding reads angles by position; learnt position embeddings are read by ``row_positions`` [1, N].

Rows keep the rank of tokens. With rank 2, a product and its sum could be one Gemm, a microsecond faster, but Gemm
starts from the residual: beyond 256 products to a sum it rounds otherwise than ``model.onnx`` and ``tree.onnx``.

Attention to a source gathers its queries and its answers so; its keys and values were packed when they were read.

Requires a graph whose attention nodes take their heads from Reshape and Transpose, possibly through RMSNormalization,
Split, Slice, Pad, Concat and RotaryEmbedding, or repeat what a Reshape makes one head, and whose positions only rotate,
look up an embedding or make a bias of attention. Ensures the same function, and no product with weights over padding.

Source: ONNX operators Gather-13, GatherND-13, RotaryEmbedding-23.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import BIAS, KEYS, QUERIES, VALUES
from outrider.export.graph.edits import Axis, constant, put, put_input, replace, source

_HEADS_FIRST = (0, 2, 1, 3)
# Operators of heads [B, h, T, D] that know nothing of rows.
_KEEPING = frozenset({"Split", "Slice", "RotaryEmbedding", "RMSNormalization", "Expand", "Pad"})
# Inputs of RotaryEmbedding.
_COS, _SIN, _PLACES = 1, 2, 3
# Sizes of packed rows instead of a rectangle's [B, T, size]; the last is kept.
_RANKED = (1, -1, 0)


def pack_rows(graph: ir.Graph, nodes: Sequence[ir.Node], positions: ir.Value) -> bool:
    """Pack the rows of a graph, in place; return False, possibly after some rewrites, where its form is unknown.

    The caller groups the queries of its Attention nodes afterwards, so that they answer [B, H, G*T, D], and calls
    ``declare_rows``. Positions [B, T] are those of the rectangle.
    """
    entries = _Entries(graph)
    for node in nodes:
        if not all(entries.pack(value) for value in (node.inputs[QUERIES], *_updates(node))):
            return False
    # Features are written to a cache that no attention reads.
    if not all(entries.pack(node.inputs[1]) for node in graph if node.op_type == "TensorScatter"):
        return False
    packed = [_pack_answers(graph, node) for node in nodes]
    last = packed[-1]
    return (
        all(packed)
        and last is not None
        and _keep_rows(graph)
        and _want_rows(graph, last)
        and _place_by_position(graph, positions)
    )


class _Entries:
    """Nodes that gather heads of the rectangle from packed rows."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rows: dict[int, ir.Value] = {}
        self._packed: set[ir.Node] = set()

    def pack(self, value: ir.Value | None) -> bool:
        """Make a value [B, h, T, D] from packed rows; return False where its form is unknown."""
        node = None if value is None else value.producer()
        if node is None or node in self._packed:
            return node is not None
        if node.op_type in _KEEPING:
            return self.pack(node.inputs[0])
        if node.op_type == "Concat":
            return all(map(self.pack, node.inputs))
        if node.op_type == "Reshape":
            return self._pack_one_head(node)
        return node.op_type == "Transpose" and self._pack_heads(node)

    def _pack_one_head(self, raised: ir.Node) -> bool:
        """Gather the rows of what all heads share, [B, T, D] so far, where a Reshape gave it an axis."""
        sizes = constant(raised.inputs[1])
        if sizes is None or len(sizes) != 4 or sizes[1] != 1 or raised.inputs[0] is None:
            return False
        rows, name = ir.node("Reshape", [raised.inputs[0], None]), raised.outputs[0].name
        flat = put(self._graph, np.array([-1, int(sizes[3])], np.int64), f"{name}.rows")
        rows.replace_input_with(1, flat)
        rows.outputs[0].name, rows.outputs[0].type = f"{name}.flat", raised.outputs[0].type
        self._graph.insert_before(raised, rows)
        gathered = ir.node("Gather", [rows.outputs[0], self._rows_of(1)])
        replace(self._graph, raised, gathered)
        self._graph.remove(raised, safe=True)
        self._packed.add(gathered)
        return True

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
            self._rows[count] = put_input(
                self._graph,
                names.head_rows_name(count),
                ir.DataType.INT64,
                ["batch", count, "tokens"],
            )
        return self._rows[count]


def _updates(node: ir.Node) -> list[ir.Value | None]:
    """Return the updates written to the caches before attention reads them; of a source there are none."""
    writes = [source(node.inputs[index], "TensorScatter") for index in (KEYS, VALUES)]
    return [write.inputs[1] for write in writes if write is not None]


def _puts_heads_first(node: ir.Node) -> bool:
    return tuple(node.attributes.get_ints("perm", ())) == _HEADS_FIRST


def _pack_answers(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """Return the node that gathers the real rows of an attention's answers; None for an unknown form."""
    answers, queries = node.outputs[0], node.inputs[0]
    turned = [use.node for use in answers.uses()]
    if len(turned) != 1 or turned[0].op_type != "Transpose" or not _puts_heads_first(turned[0]):
        return None
    assert queries is not None and queries.shape is not None
    axes: list[Axis] = [1, "rows", queries.shape[1], 3]
    rows = next((value for value in graph.inputs if value.name == names.ROW_HEADS), None)
    rows = rows or put_input(graph, names.ROW_HEADS, ir.DataType.INT64, axes)
    if rows.shape is None or rows.shape[2] != axes[2]:
        return None
    gathered = ir.node("GatherND", [answers, rows])
    replace(graph, turned[0], gathered)
    graph.remove(turned[0], safe=True)
    return gathered


def _want_rows(graph: ir.Graph, last: ir.Node) -> bool:
    """Keep only wanted rows behind the last attention, whose answers ``last`` gathers."""
    wanted = next(value for value in graph.inputs if value.name == names.LOGIT_POSITIONS)
    gathers = [node for node in graph if node.op_type == "GatherND" and _takes(node, wanted)]
    behind = _reached(last.outputs[0])
    if (
        len(gathers) != 1
        or gathers[0] not in behind
        or {"Attention", "TensorScatter"} & {node.op_type for node in behind}
    ):
        return False
    rows = last.inputs[1]
    assert rows is not None and rows.shape is not None
    axes: list[Axis] = [1, "wanted", *rows.shape[2:]]
    last.replace_input_with(1, put_input(graph, names.WANTED_HEADS, ir.DataType.INT64, axes))
    # Values that bypass the last attention: the residual.
    tokens = next(value for value in graph.inputs if value.name == names.TOKENS)
    others = _reached(tokens) - behind - {last}
    passing = dict.fromkeys(
        value
        for node in graph
        if node in behind
        for value in node.inputs
        if value is not None and value.producer() in others
    )
    for value in passing:
        if value.shape is None or len(value.shape) != 3:
            return False
        gathered = ir.node("Gather", [value, wanted], attributes={"axis": 1})
        gathered.outputs[0].name = f"{value.name}.wanted"
        producer = value.producer()
        assert producer is not None
        graph.insert_after(producer, gathered)
        for use in tuple(value.uses()):
            if use.node in behind:
                use.node.replace_input_with(use.idx, gathered.outputs[0])
    rows_already = gathers[0].inputs[0]
    assert rows_already is not None
    gathers[0].outputs[0].replace_all_uses_with(rows_already)
    graph.remove(gathers[0], safe=True)
    return True


def _takes(node: ir.Node, wanted: ir.Value) -> bool:
    index = source(node.inputs[1], "Unsqueeze")
    return index is not None and index.inputs[0] is wanted


def _reached(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that depend on a value."""
    found: set[ir.Node] = set()
    left = [use.node for use in value.uses()]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += (use.node for output in node.outputs for use in output.uses())
    return found


def _keep_rows(graph: ir.Graph) -> bool:
    """Keep rows packed behind products of rank 2, which reshaped to [B, T, size]."""
    for node in graph:
        if node.op_type != "Reshape" or constant(node.inputs[1]) is not None:
            continue
        sizes = source(node.inputs[1], "Concat")
        size = None if sizes is None else constant(sizes.inputs[-1])
        if sizes is None or size is None or len(sizes.inputs) != len(_RANKED):
            return False
        if not all(source(value, "Shape") for value in sizes.inputs[:-1]):
            return False
        target = np.array([*_RANKED[:-1], int(size.item())], np.int64)
        node.replace_input_with(1, put(graph, target, f"{node.outputs[0].name}.rows"))
    return True


def _place_by_position(graph: ir.Graph, positions: ir.Value) -> bool:
    """Rotate by positions of the rectangle, look up embeddings by those of packed rows.

    RotaryEmbedding reads its tables by position itself, two nodes less. Returns False where positions have other uses.
    """
    by_row = None
    for use in tuple(positions.uses()):
        table = use.node
        turned = tuple(table.outputs[0].uses())
        if table.op_type == "Gather" and all(
            user.node.op_type == "RotaryEmbedding" and user.idx in (_COS, _SIN) for user in turned
        ):
            for user in turned:
                user.node.resize_inputs(_PLACES + 1)
                user.node.replace_input_with(user.idx, table.inputs[0])
                user.node.replace_input_with(_PLACES, positions)
            graph.remove(table, safe=True)
        elif _looks_up(*use):
            if by_row is None:
                by_row = put_input(graph, names.ROW_POSITIONS, ir.DataType.INT64, [1, "rows"])
            table.replace_input_with(use.idx, by_row)
        elif not _makes_bias(table):
            return False
    return True


def _makes_bias(node: ir.Node) -> bool:
    """Return whether a node's outputs lead to biases of attention alone, which are rectangles."""
    left, found = [node], {node}
    while left:
        for value in left.pop().outputs:
            if value.is_graph_output():
                return False
            for use in value.uses():
                if use.node.op_type == "Attention":
                    if use.idx != BIAS:
                        return False
                elif use.node not in found:
                    found.add(use.node)
                    left.append(use.node)
    return True


def _looks_up(node: ir.Node, index: int) -> bool:
    """Return whether a node reads a constant table by positions, its input ``index``."""
    if node.op_type == "Gather":
        return index == 1 and constant(node.inputs[0]) is not None
    if node.op_type != "Add" or constant(node.inputs[1 - index]) is None:
        return False
    return all(_looks_up(*use) for use in node.outputs[0].uses())


def declare_rows(graph: ir.Graph) -> None:
    """Declare the shapes of inputs and outputs; drop those in between, which changed."""
    shapes: dict[str, list[int | str]] = {
        names.TOKENS: [1, "rows"],
        names.LOGIT_POSITIONS: ["wanted"],
    }
    for value in graph.inputs:
        if value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
            elif value.name == names.LOGITS:
                assert value.shape is not None
                value.shape = ir.Shape([1, "wanted", value.shape[2]])
