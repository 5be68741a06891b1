"""Rings for layers with a sliding window: a cache of C columns, token p in column p mod C, for the CPU.

The canonical graph writes every layer's cache in a line and hides what lies before the window. Here such a layer's
caches are written circularly, and one bias says what a query at position q sees. Of the tokens up to q those at
distances below n = min(window, q + 1) are seen, so with r = q mod C the columns

    r - n < c <= r                    the part up to the query's own column
    r - n + C < c                     the part before column 0, if the window reaches there

C is the caches' own size, so a cache of fewer columns, which nothing has wrapped around yet, takes the same graph.
What a ring must have room for is for its owner to know (``engines.bundle.manifest``): no token within the window may
have been overwritten.

Requires causal Attention over TensorScatter, each cache read with one window or by none. Ensures the same function
where rings have that room.

Source: ONNX operators TensorScatter-24 (mode circular), Attention-24, Mod-13.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import (
    BIAS,
    KEYS,
    LENGTHS,
    SCORES,
    VALUES,
    AttentionKind,
    attention_nodes,
    gives_scores,
    input_of,
)
from outrider.export.graph.edits import drop_unused, insert_tape, put, source
from outrider.export.graph.narrow_spans import drop_query_padding, pad_single_queries
from outrider.export.graph.position_tables import span_positions
from outrider.export.graph.tracing.attention import SUM_COLUMNS
from outrider.export.graph.windows import seen_in_window, window_of
from outrider.export.weights.block_products import save_for_cpu

RING_AXIS = "ring"
"""Name of the axis of columns of a ring, in inputs and outputs of a graph."""


def ring_layers(path: Path) -> tuple[int, ...]:
    """Return the layers of the canonical graph at ``path`` whose caches may be rings; none if any may not."""
    graph = ir.load(path).graph
    drop_query_padding(graph)
    nodes = attention_nodes(graph, AttentionKind.SELF)
    windowed = [node for node in nodes if _window(node)]
    caches = {cache for node in windowed for cache in _caches(node)}
    others = {cache for node in nodes if node not in windowed for cache in _caches(node)}
    if len({_window(node) for node in windowed}) != 1 or caches & others:
        return ()
    return tuple(sorted(int(name.removeprefix("key.")) for name in caches if "key." in name))


def derive_ring_graph(path: Path) -> None:
    """Write ``rings.onnx`` beside the canonical graph at ``path``, whose ``ring_layers`` are some."""
    model = ir.load(path)
    drop_query_padding(model.graph)
    positions = span_positions(model.graph)
    assert positions is not None
    tape = ir.tape.Tape()
    axes = put(model.graph, np.array([1, 3], np.int64), "ring_places.axes")
    numbers = tape.op("Cast", [positions], attributes={"to": ir.DataType.FLOAT})
    places = tape.op("Unsqueeze", [numbers, axes])
    insert_tape(model.graph, tape, "ring_places", after=positions.producer())
    keep_rings(model.graph, attention_nodes(model.graph, AttentionKind.SELF), places)
    drop_unused(model.graph)
    pad_single_queries(model.graph)
    # Weights keep naming the data file of model.onnx: they were never read.
    save_for_cpu(model, path.parent / names.RINGS_FILE)


def keep_rings(graph: ir.Graph, nodes: Sequence[ir.Node], places: ir.Value) -> list[ir.Node]:
    """Let the nodes with a window write and read rings; return the others.

    Args:
        graph: of the nodes.
        nodes: causal attention over caches.
        places: [B, 1, T, 1] float32, positions of their queries.
    """
    mask: ir.Value | None = None
    others = []
    for node in nodes:
        window = _window(node)
        if not window:
            others.append(node)
            continue
        for index in (KEYS, VALUES):
            scatter = source(node.inputs[index], "TensorScatter")
            assert scatter is not None
            scatter.attributes["mode"] = ir.AttrString("mode", "circular")
            for value in (scatter.inputs[0], scatter.outputs[0]):
                assert value is not None and value.shape is not None
                value.shape = ir.Shape([*value.shape[:2], RING_AXIS, value.shape[3]])
        if mask is None:
            mask = _ring_mask(graph, node.inputs[KEYS], places, window)
        _sum_columns(graph, node)
        node.replace_input_with(BIAS, mask)
        node.replace_input_with(LENGTHS, None)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    return others


def _ring_mask(graph: ir.Graph, keys: ir.Value | None, places: ir.Value, window: int) -> ir.Value:
    """Return [B, 1, T, C] float32: 0 where a query sees a column, else minus infinity."""
    scatter = source(keys, "TensorScatter")
    assert scatter is not None
    numbers = {"window": window, "one": 1, "zero": 0, "unseen": -np.inf}
    known = {
        name: put(graph, np.array(number, np.float32), f"ring_mask.{name}")
        for name, number in numbers.items()
    }
    tape = ir.tape.Tape()
    shape = tape.op("Shape", [scatter.inputs[0]], attributes={"start": 2, "end": 3})
    size = tape.op("Squeeze", [tape.op("Cast", [shape], attributes={"to": ir.DataType.FLOAT})])
    columns = tape.op("Range", [known["zero"], size, known["one"]])
    last = tape.op("Mod", [places, size], attributes={"fmod": 1})
    seen = tape.op("Min", [known["window"], tape.op("Add", [places, known["one"]])])
    first = tape.op("Sub", [last, seen])
    before = tape.op(
        "Where",
        [tape.op("LessOrEqual", [columns, last]), first, tape.op("Add", [first, size])],
    )
    is_seen = tape.op("Greater", [columns, before])
    mask = tape.op("Where", [is_seen, known["zero"], known["unseen"]])
    insert_tape(graph, tape, "ring_mask", after=places.producer())
    mask.type = ir.TensorType(ir.DataType.FLOAT)
    return mask


def _sum_columns(graph: ir.Graph, node: ir.Node) -> None:
    """Let weights beside sinks be summed by as many ones as a ring has columns (``tracing.attention``)."""
    if not gives_scores(node):
        return
    (difference,) = (use.node for use in node.outputs[SCORES].uses() if use.node.op_type == "Sub")
    (exponential,) = (use.node for use in difference.outputs[0].uses())
    (product,) = (use.node for use in exponential.outputs[0].uses())
    name, tape = f"{product.outputs[0].name}.ones", ir.tape.Tape()
    one = put(graph, np.array(1, np.float32), f"{name}.one")
    width = put(graph, np.array([SUM_COLUMNS], np.int64), f"{name}.width")
    count = tape.op("Shape", [exponential.outputs[0]], attributes={"start": 3})
    size = tape.op("Concat", [count, width], attributes={"axis": 0})
    product.replace_input_with(1, tape.op("Expand", [one, size]))
    insert_tape(graph, tape, name, before=product)


def _window(node: ir.Node) -> int:
    """Return the window of an Attention node, in tokens; 0 without one."""
    bias = input_of(node, BIAS)
    return 0 if bias is None or seen_in_window(bias) is None else window_of(bias)


def _caches(node: ir.Node) -> list[str]:
    """Return the graph's inputs that an Attention node's keys and values are written to."""
    found = [source(node.inputs[index], "TensorScatter") for index in (KEYS, VALUES)]
    return [str(write.inputs[0].name) for write in found if write is not None and write.inputs[0]]
