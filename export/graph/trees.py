"""The graphs that verify trees, derived from a finished canonical graph.

``tree.onnx`` is ``model.onnx`` with positions as an input and attention under a mask made from the input
``ancestors``; attention to a source stays as it is. It reads each head of the cache once
(``export.graph.grouped_heads``), for the CPU. It is derived after all other passes, so it has the same fusions and
quantisation and reads the same weights from the same data files. Products with integer blocks are those of
``grouped.onnx``, where there is one: answers by trees and by chains have the same bits. ``keep_path.onnx`` copies the
cache rows of a kept path into place. Those of accelerators are derived by the add-on ``export.accelerators``, with what
is here.

Requires of ``model.onnx``: a value ``kv_export.POSITIONS_VALUE`` and Attention nodes that are
causal with lengths; ``grouped.onnx`` was derived before. Ensures that no weight is stored twice.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import AttentionKind, attention_nodes, count_kinds
from outrider.export.graph.edits import insert_tape, put_input
from outrider.export.graph.grouped_heads import give_mask, give_positions, group_heads
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.position_tables import span_positions, value_named
from outrider.export.graph.tracing.stack_tables import KEY_POSITIONS_VALUE
from outrider.export.weights.block_products import save_for_cpu

_OPSET = 24


def derive_tree_graphs(path: Path) -> None:
    """Write ``tree.onnx`` and ``keep_path.onnx`` beside the canonical graph at ``path``.

    Raises:
        BundleError: the graph knows no positions or its attention takes no tree mask.
    """
    model = ir.load(path)
    drop_query_padding(model.graph)  # no tree is one token wide
    keeper = keep_path_graph(model.graph, ir.DataType.FLOAT)
    ir.save(keeper, path.parent / names.KEEP_PATH_FILE)
    give_tree_inputs(model.graph, path.parent.name)
    group_heads(model.graph)
    RemoveUnusedNodesPass()(model)
    # Weights keep naming the data file of model.onnx: they were never read.
    tree, grouped = (path.with_name(name) for name in (names.TREE_FILE, names.GROUPED_FILE))
    if grouped.exists():
        save_for_cpu(model, tree, over=grouped)
    else:
        ir.save(model, tree)


def give_tree_inputs(graph: ir.Graph, where: str) -> None:
    """Give a canonical graph the inputs of trees, positions and ancestors, and attention under their mask.

    ``where`` names the graph in errors.

    Raises:
        BundleError: the graph knows no positions or its attention takes no tree mask.
    """
    if span_positions(graph) is None:
        raise BundleError(
            f"{where}: the graph uses no positions, so it cannot place a tree; "
            "export with max_tree_nodes 0"
        )
    give_positions(graph)
    kinds = count_kinds(graph)
    if not {*kinds} <= {AttentionKind.SELF, AttentionKind.SOURCE}:
        raise BundleError(
            f"{where}: an Attention node is not causal over a cache, so it takes no tree "
            "mask; export with max_tree_nodes 0"
        )
    if not kinds[AttentionKind.SELF]:
        raise BundleError(f"{where}: the graph has no Attention node over a cache")
    put_input(graph, names.ANCESTORS, ir.DataType.BOOL, ["batch", "tokens", "tokens"])
    give_mask(graph, attention_nodes(graph, AttentionKind.SELF), _add_mask(graph))


def _add_mask(graph: ir.Graph) -> ir.Value:
    """Add the mask [batch, 1, tokens, capacity] bool of a tree to the graph.

    Column c of row b is cached text below ``start[b]``, token c - start[b] of the span in
    [start[b], lengths[b]), and unseen above. Where lengths are an input, no value is computed from both an
    input and a shape: the CUDA provider would compute it on the host.
    """
    tape = ir.tape.Tape()
    inputs = {value.name: value for value in graph.inputs}
    zero, one = _ints(tape, 0), _ints(tape, [1])
    start, ancestors = inputs[names.START], inputs[names.ANCESTORS]
    lengths = inputs.get(names.LENGTHS)
    if lengths is None:
        num_tokens = tape.op("Shape", [inputs[names.TOKENS]], {"start": 1, "end": 2})
        lengths = tape.op("Add", [start, num_tokens])
    capacity = tape.op("Shape", [inputs[names.key_name(0)]], {"start": 2, "end": 3})
    columns = tape.op("Range", [zero, tape.op("Squeeze", [capacity]), _ints(tape, 1)])
    # [batch, 1], to be compared with columns [capacity].
    begin, end = (tape.op("Unsqueeze", [value, one]) for value in (start, lengths))
    is_cached = tape.op("Less", [columns, begin])
    is_below_end = tape.op("Less", [columns, end])
    # [batch, capacity]: the column's place in the span, or the nearest.
    nearest = tape.op("Max", [tape.op("Min", [columns, tape.op("Sub", [end, one])]), begin])
    inside = tape.op("Sub", [nearest, begin])
    _place_keys(graph, tape, columns, is_cached, inside)
    rows = tape.op("Shape", [ancestors], {"start": 0, "end": 2})
    index = tape.op(
        "Expand",
        [tape.op("Unsqueeze", [inside, one]), tape.op("Concat", [rows, one], {"axis": 0})],
    )
    above = tape.op("GatherElements", [ancestors, index], {"axis": 2})
    seen = tape.op("And", [above, tape.op("Unsqueeze", [is_below_end, one])])
    # In cached text ``above`` repeats the span's first column, which does not matter: it is seen.
    seen = tape.op("Or", [seen, tape.op("Unsqueeze", [is_cached, one])])
    mask = tape.op("Unsqueeze", [seen, one])
    insert_tape(graph, tape, "tree_mask")
    return mask


def _place_keys(
    graph: ir.Graph, tape: ir.tape.Tape, columns: ir.Value, is_cached: ir.Value, inside: ir.Value
) -> None:
    """Let biases of attention read each key's position in a tree, where they read its column.

    A cached token's position is its column. ``inside`` [batch, capacity] is the place in the span of every other.
    """
    found = value_named(graph, KEY_POSITIONS_VALUE)
    if found is None:
        return
    positions = next(value for value in graph.inputs if value.name == names.POSITIONS)
    placed = tape.op("GatherElements", [positions, inside], {"axis": 1})
    placed = tape.op("Where", [is_cached, columns, placed])
    found.replace_all_uses_with(tape.op("Unsqueeze", [placed, _ints(tape, [1])]))


def keep_path_graph(model: ir.Graph, kind: ir.DataType) -> ir.Model:
    """Return the graph that reads each cache's rows at ``columns`` and writes them from ``start`` on.

    The caches are those of ``model``, of type ``kind``: the axis before their last is that of tokens.
    """
    caches = {
        value.name: value.shape
        for value in model.inputs
        if value.name and value.shape is not None and names.is_cache(value.name)
    }
    tape = ir.tape.Tape()
    start = _input(names.START, ir.DataType.INT64, ["batch"])
    columns = _input(names.COLUMNS, ir.DataType.INT64, ["kept"])
    pasts, presents = [], []
    for name, shape in caches.items():
        past = ir.Value(name=name, shape=shape, type=ir.TensorType(kind))
        axis = len(shape) - 2
        rows = tape.op("Gather", [past, columns], {"axis": axis})
        rows.name = f"{name}.kept"
        present = tape.op("TensorScatter", [past, rows, start], {"axis": axis, "mode": "linear"})
        present.name, present.shape, present.type = f"new_{name}", past.shape, past.type
        pasts.append(past)
        presents.append(present)
    graph = ir.Graph(
        [start, columns, *pasts],
        presents,
        nodes=list(tape.nodes),
        opset_imports={"": _OPSET},
        name="keep_path",
    )
    return ir.Model(graph, ir_version=11)


def _input(name: str, kind: ir.DataType, axes: list[str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(kind))


def _ints(tape: ir.tape.Tape, value: int | list[int]) -> ir.Value:
    kind = "value_int" if isinstance(value, int) else "value_ints"
    return tape.op("Constant", [], {kind: value})
