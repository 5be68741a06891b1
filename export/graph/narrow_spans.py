"""Padding of one-token spans in a batch, so that they have the bits of wider spans.

ONNX Runtime's CPU provider multiplies one row by other kernels than many rows. A batch of single tokens has many rows
everywhere but inside attention, whose products are per row and head. So attention gets a zero query before the only
one, and its answer is dropped. Keys, values and lengths stay: causal attention is aligned at its last query, and
attention to a source or within one at none. A bias gets a row of zeros for that query.

Requires Attention on queries [B, H, T, D] with a bias [B, H, T, S] or none, answers used once. Ensures the same
function. At T >= 2 nothing is added, and the two nodes per layer copy their input.

Source: ONNX operators Attention-24, Pad-24, Slice-13.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import SOURCE
from outrider.export.graph.attention_kinds import (
    BIAS,
    QUERIES,
    answers_of,
    attention_nodes,
    input_of,
)
from outrider.export.graph.edits import put, source

NARROWEST_SPAN = 1
"""Tokens of the narrowest span whose bits do not depend on it, in a batch of at least two rows."""
_QUERIES_AXIS = 2
_NUM_AXES = 4
_LEAST_QUERIES = 2
_PADS = "query_padding"


def pad_single_queries(graph: ir.Graph) -> None:
    """Pad queries so that attention over one token per row computes two."""
    if not attention_nodes(graph):
        return
    missing, pads = _add_padding(graph)
    axis = put(graph, np.array([_QUERIES_AXIS], np.int64), f"{_PADS}.axis")
    end = put(graph, np.array([np.iinfo(np.int64).max], np.int64), f"{_PADS}.end")
    biases: dict[ir.Value, ir.Value] = {}
    for node in attention_nodes(graph):
        queries, bias, answers = node.inputs[QUERIES], input_of(node, BIAS), answers_of(node)
        assert queries is not None
        node.replace_input_with(QUERIES, _padded(graph, queries, pads, node))
        if bias is not None:
            if bias not in biases:  # all layers may share one
                biases[bias] = _padded(graph, bias, pads, node)
            node.replace_input_with(BIAS, biases[bias])
        cut = ir.node("Slice", [answers, missing, end, axis])
        cut.outputs[0].name, answers.name = answers.name, f"{answers.name}.padded"
        cut.outputs[0].type, cut.outputs[0].shape = answers.type, answers.shape
        _forget_shapes(node, answers)
        answers.replace_all_uses_with(cut.outputs[0])
        cut.replace_input_with(0, answers)
        producer = answers.producer()
        assert producer is not None
        graph.insert_after(producer, cut)


def drop_query_padding(graph: ir.Graph) -> None:
    """Undo ``pad_single_queries``; the nodes that compute the padding stay, unused."""
    for node in attention_nodes(graph):
        pad = _pad_of(node, QUERIES)
        if pad is None:
            continue
        node.replace_input_with(QUERIES, pad.inputs[0])
        if (pad_of_bias := _pad_of(node, BIAS)) is not None:
            node.replace_input_with(BIAS, pad_of_bias.inputs[0])
        answers = answers_of(node)
        cut = next(use.node for use in answers.uses())
        answers.name, answers.shape = cut.outputs[0].name, cut.outputs[0].shape
        cut.outputs[0].replace_all_uses_with(answers)
        graph.remove([cut, pad], safe=True)


def _forget_shapes(node: ir.Node, answers: ir.Value) -> None:
    """Let what lies between an Attention node and its answers have any number of queries."""
    left = [node]
    while left:
        for value in left.pop().outputs:
            value.shape = None
            if value is not answers:
                left += (use.node for use in value.uses())


def _padded(graph: ir.Graph, value: ir.Value, pads: ir.Value, before: ir.Node) -> ir.Value:
    pad = ir.node("Pad", [value, pads])
    padded = pad.outputs[0]
    padded.name, padded.type = f"{value.name}.padded", value.type
    graph.insert_before(before, pad)
    return padded


def _pad_of(node: ir.Node, index: int) -> ir.Node | None:
    pad = source(input_of(node, index), "Pad")
    is_ours = pad is not None and pad.inputs[1] is not None and pad.inputs[1].name == _PADS
    return pad if is_ours else None


def _add_padding(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """Return the number of queries to add, [1] int64, and pads of all axes, [8] int64."""
    spans = (names.TOKENS, SOURCE)
    tokens = next(value for value in graph.inputs if value.name in spans)
    least = put(graph, np.array([_LEAST_QUERIES], np.int64), f"{_PADS}.least")
    none = put(graph, np.array([0], np.int64), f"{_PADS}.none")
    before = put(graph, np.zeros(_QUERIES_AXIS, np.int64), f"{_PADS}.before")
    after = put(graph, np.zeros(2 * _NUM_AXES - _QUERIES_AXIS - 1, np.int64), f"{_PADS}.after")
    count = ir.node("Shape", [tokens], attributes={"start": 1, "end": 2})
    wanted = ir.node("Sub", [least, count.outputs[0]])
    missing = ir.node("Max", [wanted.outputs[0], none])
    pads = ir.node("Concat", [before, missing.outputs[0], after], attributes={"axis": 0})
    for node in (count, wanted, missing, pads):
        node.outputs[0].name = f"{_PADS}.{node.op_type}"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    pads.outputs[0].name = _PADS
    graph.insert_before(graph[0], [count, wanted, missing, pads])
    return missing.outputs[0], pads.outputs[0]
