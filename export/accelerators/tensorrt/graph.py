"""The graph that TensorRT's parser is given, derived from the canonical one and still standard ONNX.

Three rewrites. The cache axis becomes one number, since KV_CACHE_UPDATE takes no other. Attention
reads a boolean mask (column j of a row is seen by token i when j <= start + i) instead of
``is_causal`` with ``nonpad_kv_seqlen``: TensorRT-RTX 1.7.1's parser drops the lengths, anchors the
causal mask at the first column and builds a plan that answers wrongly. And, for 16 bits, weights,
caches and matrix products take that type while norms, rotations and the residual stay float32.

Attention to a source, and within one, reads such a mask too (column j is seen when j < source_length); a bias of the
scores, where there is one, is added to it. Caches of sources have one capacity.

The graph runs on ONNX Runtime too, so tests compare it with the canonical graph without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import HIDDEN, SOURCE, SOURCE_LENGTH, is_source_cache
from outrider.export.accelerators.float8 import FLOAT8, narrow_weights
from outrider.export.accelerators.half_products import HalfPass
from outrider.export.graph.attention_kinds import (
    AttentionKind,
    attention_kind,
    attention_nodes,
    gives_scores,
)
from outrider.export.graph.edits import drop_unused, insert_tape, put, put_tensor, take_over
from outrider.export.graph.grouped_heads import give_mask
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.tracing.experts import has_experts
from outrider.export.weights.lookup import integer_lookups, rows_of

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
    source_capacity: int = 0,
    mask: Callable[[ir.Graph], None] | None = None,
) -> None:
    """Write the graph for TensorRT to ``out``, with its weights in ``out``.data.

    Args:
        source: canonical graph of a bundle.
        out: file to write in an existing folder.
        capacity: S of every cache tensor.
        precision: one of ``PRECISIONS``.
        source_capacity: likewise of caches of sources; 0 for a model without an encoder.
        mask: rewrites Attention nodes, causal by lengths so far, to read a boolean mask; None for the
            mask of chains.

    Raises:
        BundleError: an attention is not the canonical one or has sinks, a weight is beyond float16, or there
            is none to store in 8 bits.
    """
    model = ir.load(source)
    ir.external_data.load_to_model(model)
    drop_query_padding(model.graph)
    fix_capacity(model.graph, capacity, source_capacity)
    _check_kinds(model.graph, {AttentionKind.SELF, AttentionKind.SOURCE}, source.parent.name)
    if mask is None:
        _mask_text(model.graph, capacity)
    else:
        mask(model.graph)
    if source_capacity:
        _mask_source(model.graph, source_capacity)
    _save(model, out, precision, source.parent.name)


def derive_read_graph(source: Path, out: Path, *, capacity: int, precision: str) -> int:
    """Write the graph that reads sources to ``out``, with its weights in ``out``.data; return its Attention nodes.

    Arguments and errors are those of ``derive_graph``; ``source`` is a bundle's ``encode.onnx``. What it answers a
    draft that shares the encoder is left out: on devices a draft has its own.
    """
    model = ir.load(source)
    ir.external_data.load_to_model(model)
    for value in [value for value in model.graph.outputs if value.name == HIDDEN]:
        model.graph.outputs.remove(value)
    drop_query_padding(model.graph)
    fix_capacity(model.graph, 0, capacity)
    _check_kinds(model.graph, {AttentionKind.ENCODER}, source.parent.name)
    _mask_encoder(model.graph)
    _save(model, out, precision, source.parent.name)
    return len(attention_nodes(model.graph))


def _check_kinds(graph: ir.Graph, allowed: Set[AttentionKind], where: str) -> None:
    for node in attention_nodes(graph):
        if attention_kind(node) not in allowed:
            raise BundleError(
                f"{where}/{node.name}: not a canonical attention; export the bundle again"
            )
        if gives_scores(node):
            raise BundleError(f"{where}: attention with sinks has no TensorRT plan")


def _save(model: ir.Model, out: Path, precision: str, where: str) -> None:
    """Give weights and products their precision, and write the graph to ``out``."""
    if has_experts(model.graph):
        raise BundleError(
            f"{where}: experts are not built for TensorRT; serve the bundle on the CPU"
        )
    _restore_stored_halves(model.graph)
    _restore_tables(model.graph)
    if precision != "float32":
        HalfPass(model.graph, DATA_TYPES[precision], where).run()
    if precision == FLOAT8:
        narrow_weights(model.graph, where)
    drop_unused(model.graph)
    ir.save(model, out, external_data=f"{out.name}.data")


def fix_capacity(graph: ir.Graph, capacity: int, source_capacity: int = 0) -> None:
    """Make the axis of a graph's caches, of texts and of sources, one number."""
    for value in (*graph.inputs, *graph.outputs):
        name = value.name or ""
        if names.is_cache(name) or is_source_cache(name):
            assert value.shape is not None
            size = capacity if names.is_cache(name) else source_capacity
            value.shape = ir.Shape([*value.shape[:2], size, *value.shape[3:]])


def _mask_text(graph: ir.Graph, capacity: int) -> None:
    """Let tokens see the columns of their row's cache up to their own."""
    tape, inputs = ir.tape.Tape(), {value.name: value for value in graph.inputs}
    steps = _steps(graph, tape, inputs[names.TOKENS], "mask")
    axis = _constant(graph, "mask.axis_of_start", [1])
    last = tape.op("Add", [tape.op("Unsqueeze", [inputs[names.START], axis]), steps])
    _give(graph, tape, AttentionKind.SELF, _columns(graph, capacity, "mask"), last, "mask")


def _mask_source(graph: ir.Graph, capacity: int) -> None:
    """Let tokens see their row's source."""
    tape, name = ir.tape.Tape(), "source_mask"
    inputs = {value.name: value for value in graph.inputs}
    last = _last_of_source(graph, tape, _steps(graph, tape, inputs[names.TOKENS], name), name)
    _give(graph, tape, AttentionKind.SOURCE, _columns(graph, capacity, name), last, name)


def _mask_encoder(graph: ir.Graph) -> None:
    """Let tokens of a source see all of it."""
    tape, name = ir.tape.Tape(), "encoder_mask"
    inputs = {value.name: value for value in graph.inputs}
    steps = _steps(graph, tape, inputs[SOURCE], name)
    columns = tape.op("Unsqueeze", [steps, _constant(graph, f"{name}.axes_of_columns", [0, 1, 2])])
    last = _last_of_source(graph, tape, steps, name)
    _give(graph, tape, AttentionKind.ENCODER, columns, last, name)


def _columns(graph: ir.Graph, capacity: int, name: str) -> ir.Value:
    """Return the numbers of a cache's columns, [1, 1, 1, S]."""
    numbers = np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, capacity)
    return _constant(graph, f"{name}.columns", numbers)


def _steps(graph: ir.Graph, tape: ir.tape.Tape, tokens: ir.Value, name: str) -> ir.Value:
    """Return the places [T] of a span of tokens [B, T]."""
    count = tape.op("Shape", [tokens], {"start": 1, "end": 2})
    zero, one = _constant(graph, f"{name}.zero", 0), _constant(graph, f"{name}.one", 1)
    return tape.op("Range", [zero, tape.op("Squeeze", [count]), one])


def _last_of_source(graph: ir.Graph, tape: ir.tape.Tape, steps: ir.Value, name: str) -> ir.Value:
    """Return the last column [B, T] of each row's source, for every place of a span."""
    length = next(value for value in graph.inputs if value.name == SOURCE_LENGTH)
    last = tape.op("Sub", [length, _constant(graph, f"{name}.one_column", 1)])
    none = tape.op("Mul", [steps, _constant(graph, f"{name}.none", 0)])
    axis = _constant(graph, f"{name}.axis_of_last", [1])
    return tape.op("Add", [tape.op("Unsqueeze", [last, axis]), none])


def _give(
    graph: ir.Graph,
    tape: ir.tape.Tape,
    kind: AttentionKind,
    columns: ir.Value,
    last: ir.Value,
    name: str,
) -> None:
    """Give attention of a kind the mask [B, 1, T, S] bool: true for columns [1, 1, 1, S] up to ``last`` [B, T]."""
    raised = tape.op("Unsqueeze", [last, _constant(graph, f"{name}.axes_of_last", [1, 3])])
    seen = tape.op("LessOrEqual", [columns, raised])
    seen.type = ir.TensorType(ir.DataType.BOOL)
    nodes = attention_nodes(graph, kind)
    insert_tape(graph, tape, name)
    give_mask(graph, nodes, seen)


def _constant(graph: ir.Graph, name: str, values: object) -> ir.Value:
    return put(graph, np.asarray(values, dtype=np.int64), name)


def _restore_tables(graph: ir.Graph) -> None:
    """Look tokens up in float32 where that is among rows of integers: TensorRT gathers no bytes."""
    for node in integer_lookups(graph):
        table = put(graph, rows_of(graph, node), f"{node.name}.table")
        tokens = next(value for value in graph.inputs if value.name in (names.TOKENS, SOURCE))
        lookup = ir.node("Gather", [table, tokens])
        graph.insert_before(node, lookup)
        take_over(node.outputs[0], lookup.outputs[0])


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
