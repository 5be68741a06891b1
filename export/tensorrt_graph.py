"""The graph that TensorRT's parser is given, derived from the canonical one and still standard ONNX.

Three rewrites. The cache axis becomes one number, since KV_CACHE_UPDATE takes no other. Attention
reads a boolean mask (column j of a row is seen by token i when j <= start + i) instead of
``is_causal`` with ``nonpad_kv_seqlen``: TensorRT-RTX 1.7.1's parser drops the lengths, anchors the
causal mask at the first column and builds a plan that answers wrongly. And, for 16 bits, weights,
caches and matrix products take that type while norms, rotations and the residual stay float32.

What comes out runs on ONNX Runtime too, so tests hold it against the canonical graph without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from engines import bundle
from engines.base import BundleError
from export.graph_edits import drop_unused, put, put_tensor
from export.narrow_spans import drop_query_padding
from export.tensorrt_float8 import FLOAT8, narrow_weights

PRECISIONS = ("float32", "float16", "bfloat16", FLOAT8)
# Of weights, caches and products.
DATA_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    FLOAT8: ir.DataType.FLOAT16,
}
# Input of an Attention node that masks; the ones behind it are the caches it would concatenate and
# the lengths.
_MASK_INPUT = 3
# Operators that move values and leave them as they are: their result keeps the 16 bits.
_MOVING = frozenset({"Transpose", "Reshape", "Gather", "DequantizeLinear", "Identity"})
# How many leading inputs of an operator are to be of the 16-bit type.
_COMPUTING = {"MatMul": 2, "Gemm": 3, "Attention": 3, "TensorScatter": 2}


def derive_graph(
    source: Path,
    out: Path,
    *,
    capacity: int,
    precision: str,
    mask: Callable[[ir.Graph], None] | None = None,
) -> None:
    """Write the graph for TensorRT to ``out``, with its weights in ``out``.data.

    Args:
        source: canonical graph of a bundle.
        out: file to write in an existing folder.
        capacity: S of every cache tensor.
        precision: one of ``PRECISIONS``.
        mask: gives every Attention node, causal by lengths so far, a boolean mask instead; None for
            that of chains.

    Raises:
        BundleError: an attention is not the canonical one, a weight is beyond float16, or there is
            none to store in 8 bits.
    """
    model = ir.load(source)
    ir.external_data.load_to_model(model)
    drop_query_padding(model.graph)
    fix_capacity(model.graph, capacity)
    if mask is None:
        _mask_attention(model.graph, capacity)
    else:
        mask(model.graph)
    _restore_stored_halves(model.graph)
    if precision != "float32":
        _HalfPass(model.graph, DATA_TYPES[precision], source.parent.name).run()
    if precision == FLOAT8:
        narrow_weights(model.graph, source.parent.name)
    drop_unused(model.graph)
    ir.save(model, out, external_data=f"{out.name}.data")


def is_cache(name: str) -> bool:
    """Whether a graph input or output of this name is a cache tensor."""
    return name.startswith(("key.", "value.", "new_key.", "new_value."))


def fix_capacity(graph: ir.Graph, capacity: int) -> None:
    """Make the cache axis of a graph's inputs and outputs one number."""
    for value in (*graph.inputs, *graph.outputs):
        if is_cache(value.name or ""):
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:2], capacity, *value.shape[3:]])


def _mask_attention(graph: ir.Graph, capacity: int) -> None:
    nodes = [node for node in graph if node.op_type == "Attention"]
    mask = _add_mask(graph, capacity)
    for node in nodes:
        inputs = [*node.inputs, *[None] * 7][:7]
        if inputs[3:6] != [None] * 3 or inputs[6] is None or not _is_causal(node):
            raise BundleError(f"{node.name}: not a canonical attention; export the bundle again")
        node.resize_inputs(_MASK_INPUT + 1)
        node.replace_input_with(_MASK_INPUT, mask)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _is_causal(node: ir.Node) -> bool:
    return node.attributes.get_int("is_causal", 0) == 1


def _add_mask(graph: ir.Graph, capacity: int) -> ir.Value:
    """Node output [B, 1, T, S] bool: whether a token may see a column of its row's cache."""
    inputs = {value.name: value for value in graph.inputs}
    columns = np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, capacity)
    shape = ir.node("Shape", [inputs[bundle.TOKENS]], attributes={"start": 1, "end": 2})
    count = ir.node("Squeeze", [shape.outputs[0]])
    steps = ir.node(
        "Range",
        [_constant(graph, "mask.zero", 0), count.outputs[0], _constant(graph, "mask.one", 1)],
    )
    starts = ir.node(
        "Unsqueeze", [inputs[bundle.START], _constant(graph, "mask.axis_of_start", [1])]
    )
    last = ir.node("Add", [starts.outputs[0], steps.outputs[0]])
    raised = ir.node("Unsqueeze", [last.outputs[0], _constant(graph, "mask.axes_of_last", [1, 3])])
    seen = ir.node("LessOrEqual", [_constant(graph, "mask.columns", columns), raised.outputs[0]])
    nodes = [shape, count, steps, starts, last, raised, seen]
    for node in nodes:
        node.outputs[0].name = f"mask.{node.op_type}.{nodes.index(node)}"
    seen.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    graph.insert_before(graph[0], nodes)
    return seen.outputs[0]


def _constant(graph: ir.Graph, name: str, values: object) -> ir.Value:
    return put(graph, np.asarray(values, dtype=np.int64), name)


def _restore_stored_halves(graph: ir.Graph) -> None:
    """Fold every Cast of a stored weight, so that the passes below see float32 weights only."""
    for node in list(graph):
        stored = node.inputs[0] if node.op_type == "Cast" else None
        if stored is None or not stored.is_initializer() or stored.const_value is None:
            continue
        kind = ir.DataType(node.attributes.get_int("to", 0))
        name = f"{stored.name}.restored"
        array = stored.const_value.numpy().astype(kind.numpy())
        restored = put_tensor(graph, ir.tensor(array, dtype=kind, name=name))
        node.outputs[0].replace_all_uses_with(restored)


class _HalfPass:
    """Gives weights, caches and matrix products a 16-bit type; casts where it meets float32.

    Args:
        graph: rewritten in place.
        kind: FLOAT16 or BFLOAT16.
        where: how errors call the graph.
    """

    def __init__(self, graph: ir.Graph, kind: ir.DataType, where: str) -> None:
        self._graph = graph
        self._kind = kind
        self._where = where
        self._casts: dict[tuple[int, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        for value in (*self._graph.inputs, *self._graph.outputs):
            if is_cache(value.name or ""):
                value.type = ir.TensorType(self._kind)
        for weight in self._weights():
            self._narrow(weight)
        for node in list(self._graph):
            if node.op_type in _COMPUTING and self._has_half(node):
                self._cast_inputs(node, _COMPUTING[node.op_type], self._kind)
            elif node.op_type in _MOVING and self._has_half(node):
                pass
            else:
                self._cast_inputs(node, len(node.inputs), ir.DataType.FLOAT)
                continue
            node.outputs[0].type = ir.TensorType(self._kind)
        self._widen_logits()

    def _weights(self) -> list[ir.Value]:
        """Initializers behind a matrix product, and the embedding of the tokens."""
        found: dict[str | None, ir.Value] = {}
        for node in self._graph:
            if node.op_type in ("MatMul", "Gemm"):
                roots = [_root(value) for value in node.inputs[:2]]
            elif node.op_type == "Gather" and _is_tokens(node.inputs[1]):
                roots = [_root(node.inputs[0])]
            else:
                continue
            found.update({root.name: root for root in roots if root is not None})
        return list(found.values())

    def _narrow(self, weight: ir.Value) -> None:
        assert weight.const_value is not None
        values = weight.const_value.numpy()
        if self._kind is ir.DataType.FLOAT16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise BundleError(
                f"{self._where}: {weight.name} is beyond the range of float16; "
                "build with --precision bfloat16"
            )
        array = values.astype(self._kind.numpy())
        weight.const_value = ir.tensor(array, dtype=self._kind, name=weight.name)
        weight.type = ir.TensorType(self._kind)

    def _has_half(self, node: ir.Node) -> bool:
        return any(value is not None and value.dtype is self._kind for value in node.inputs)

    def _cast_inputs(self, node: ir.Node, count: int, kind: ir.DataType) -> None:
        floats = (ir.DataType.FLOAT, self._kind)
        for index, value in enumerate(node.inputs[:count]):
            if value is not None and value.dtype in floats and value.dtype is not kind:
                node.replace_input_with(index, self._cast(value, kind, node))

    def _cast(self, value: ir.Value, kind: ir.DataType, before: ir.Node) -> ir.Value:
        key = (id(value), kind)
        if key not in self._casts:
            node = ir.node("Cast", [value], attributes={"to": kind.value})
            node.outputs[0].name = f"{value.name}.{kind.name.lower()}"
            node.outputs[0].type = ir.TensorType(kind)
            node.outputs[0].shape = value.shape
            self._graph.insert_before(before, node)
            self._casts[key] = node.outputs[0]
        return self._casts[key]

    def _widen_logits(self) -> None:
        """Give the logits out as float32, whatever computed them."""
        index, old = next(
            (index, value)
            for index, value in enumerate(self._graph.outputs)
            if value.name == bundle.LOGITS
        )
        if old.dtype is not self._kind:
            return
        old.name = f"{bundle.LOGITS}.half"
        node = ir.node("Cast", [old], attributes={"to": ir.DataType.FLOAT.value})
        logits = node.outputs[0]
        logits.name, logits.shape = bundle.LOGITS, old.shape
        logits.type = ir.TensorType(ir.DataType.FLOAT)
        self._graph.append(node)
        self._graph.outputs[index] = logits


def _root(value: ir.Value | None) -> ir.Value | None:
    """The float32 matrix a value is made of by moving or dequantising, if it is a constant."""
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.op_type not in ("Transpose", "DequantizeLinear"):
            return None
        # Of quantised weights the scales carry the type.
        value = producer.inputs[1 if producer.op_type == "DequantizeLinear" else 0]
    if value is None or value.const_value is None or value.dtype is not ir.DataType.FLOAT:
        return None
    return value if len(value.const_value.shape) == 2 else None


def _is_tokens(value: ir.Value | None) -> bool:
    return value is not None and value.name == bundle.TOKENS
