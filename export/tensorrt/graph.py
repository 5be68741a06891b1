"""The graph that TensorRT's parser is given, derived from the canonical one and still standard ONNX.

Three rewrites. The cache axis becomes one number, since KV_CACHE_UPDATE takes no other. Attention
reads a boolean mask (column j of a row is seen by token i when j <= start + i) instead of
``is_causal`` with ``nonpad_kv_seqlen``: TensorRT-RTX 1.7.1's parser drops the lengths, anchors the
causal mask at the first column and builds a plan that answers wrongly. And, for 16 bits, weights,
caches and matrix products take that type while norms, rotations and the residual stay float32.

The graph runs on ONNX Runtime too, so tests compare it with the canonical graph without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import AttentionKind, attention_kind, attention_nodes
from outrider.export.graph.edits import drop_unused, insert_tape, put, put_tensor
from outrider.export.graph.grouped_heads import give_mask
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.weights.float8 import FLOAT8, narrow_weights
from outrider.export.weights.half_products import HalfPass, is_cache

PRECISIONS = ("float32", "float16", "bfloat16", FLOAT8)
# Of weights, caches and products.
DATA_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    FLOAT8: ir.DataType.FLOAT16,
}


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
        mask: rewrites Attention nodes, causal by lengths so far, to read a boolean mask; None for the
            mask of chains.

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
        HalfPass(model.graph, DATA_TYPES[precision], source.parent.name).run()
    if precision == FLOAT8:
        narrow_weights(model.graph, source.parent.name)
    drop_unused(model.graph)
    ir.save(model, out, external_data=f"{out.name}.data")


def fix_capacity(graph: ir.Graph, capacity: int) -> None:
    """Make the cache axis of a graph's inputs and outputs one number."""
    for value in (*graph.inputs, *graph.outputs):
        if is_cache(value.name or ""):
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:2], capacity, *value.shape[3:]])


def _mask_attention(graph: ir.Graph, capacity: int) -> None:
    nodes = attention_nodes(graph)
    for node in nodes:
        if attention_kind(node) is not AttentionKind.SELF:
            raise BundleError(f"{node.name}: not a canonical attention; export the bundle again")
    give_mask(graph, nodes, _add_mask(graph, capacity))


def _add_mask(graph: ir.Graph, capacity: int) -> ir.Value:
    """Add the mask [B, 1, T, S] bool: true where a token may see a column of its row's cache."""
    inputs = {value.name: value for value in graph.inputs}
    columns = np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, capacity)
    tape = ir.tape.Tape()
    count = tape.op("Shape", [inputs[names.TOKENS]], {"start": 1, "end": 2})
    zero, one = _constant(graph, "mask.zero", 0), _constant(graph, "mask.one", 1)
    steps = tape.op("Range", [zero, tape.op("Squeeze", [count]), one])
    axis = _constant(graph, "mask.axis_of_start", [1])
    last = tape.op("Add", [tape.op("Unsqueeze", [inputs[names.START], axis]), steps])
    raised = tape.op("Unsqueeze", [last, _constant(graph, "mask.axes_of_last", [1, 3])])
    seen = tape.op("LessOrEqual", [_constant(graph, "mask.columns", columns), raised])
    seen.type = ir.TensorType(ir.DataType.BOOL)
    insert_tape(graph, tape, "mask")
    return seen


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
