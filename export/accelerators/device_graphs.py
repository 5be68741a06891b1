"""The graphs that ONNX Runtime's CUDA provider runs, derived from a finished canonical graph.

``device.onnx`` is ``model.onnx`` with ``lengths`` as an input: what attention reads of each row's cache. The canonical
graph computes them as ``start`` plus the span's width, a shape. The provider computes with shapes on the host, so
``start`` would become an input of the host's, which IO binding copies once, when it is bound, and never again.
Attention stays causal by lengths, without a mask, as fused kernels want it. No query is padded: only the CPU promises
equal bits for spans of every length.

``device_tree.onnx`` verifies trees under a mask, ``device_keep_path.onnx`` moves a kept path; see
``export.graph.trees``. Heads are not grouped: that is for the CPU.

``device_encode.onnx`` is ``encode.onnx`` for the same provider, where the model has an encoder. It writes sources from
column ``source_length - source_length`` on, a zero of each row that is computed on the device.

Caches of texts are by token (``token_major``) but for models with an encoder, and a sum and the norm behind it are one
operator (``joined_norms``): launches, not bytes, are what a step of a small model takes on a GPU.

With a 16-bit precision caches, products and the residual have that type, and what lies behind the last product is
float32; of a model with an encoder norms, rotations and the residual are. Fused attention kernels take 16 bits alone.
Matrices are read as ``export.weights.half_weights`` or ``blocks`` stores them; what of them needs another type, such as
the scales of blocks, is stored in ``device.onnx.data``, and in ``device_encode.onnx.data``.

Requires Attention that is causal over its cache, or reads a source by its length. Ensures the same function up to
rounding; no weight is stored twice but blocks of integers where the precision is bfloat16
(``export.weights.block_products``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import DEVICE_ENCODE_FILE, ENCODE_FILE, SOURCE_LENGTH
from outrider.export.accelerators.half_products import HalfPass
from outrider.export.accelerators.joined_norms import join_norms
from outrider.export.accelerators.token_major import lay_out_by_token
from outrider.export.graph.attention_kinds import (
    LENGTHS,
    AttentionKind,
    attention_kind,
    attention_nodes,
    gives_scores,
)
from outrider.export.graph.edits import constant, drop_unused, put, put_input, source, take_over
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.trees import give_tree_inputs, keep_path_graph
from outrider.export.weights.block_products import name_block_products, store_beside
from outrider.export.weights.half_weights import FLOAT32, HALF_TYPES

_KINDS = {FLOAT32: ir.DataType.FLOAT, **HALF_TYPES}
# Input of TensorScatter-24: the columns that rows are written from.
_WRITE_INDICES = 2
# Constants of a model's graphs, in a file beside the first of them.
_WITH_DATA = (names.DEVICE_FILE, DEVICE_ENCODE_FILE)


def derive_device_graphs(path: Path, precision: str, *, with_trees: bool) -> None:
    """Write the graphs of accelerators beside the canonical graph at ``path``.

    Args:
        path: of the canonical graph.
        precision: of caches and products: "float32", "float16" or "bfloat16".
        with_trees: write those that verify trees too.

    Raises:
        BundleError: an attention is not causal over its cache or has sinks, a weight is beyond float16, or trees are
            asked of a graph without positions.
    """
    drop_device_graphs(path)
    kind = _KINDS[precision]
    out, encode_out = (path.with_name(name) for name in _WITH_DATA)
    constants = _Constants(out)
    _derive(path, out, kind, constants)
    if with_trees:
        tree_out = path.with_name(names.DEVICE_TREE_FILE)
        _derive(path, tree_out, kind, constants, takes_trees=True)
        keeper = keep_path_graph(ir.load(out).graph, kind)
        ir.save(keeper, path.with_name(names.DEVICE_KEEP_PATH_FILE))
    if (encode_path := path.with_name(ENCODE_FILE)).exists():
        _derive(encode_path, encode_out, kind, _Constants(encode_out))


def drop_device_graphs(path: Path) -> None:
    """Remove the graphs of accelerators beside the canonical graph at ``path``, where there are any."""
    for name in (*names.DEVICE_FILES, DEVICE_ENCODE_FILE, *(f"{one}.data" for one in _WITH_DATA)):
        path.with_name(name).unlink(missing_ok=True)


class _Constants:
    """The constants of graphs that are not among their canonical graph's, in one file beside the first of them."""

    def __init__(self, first: Path) -> None:
        self._path = first.with_name(f"{first.name}.data")
        self._tensors: dict[str | None, ir.ExternalTensor] = {}

    def store(self, values: Sequence[ir.Value]) -> None:
        """Let values be those of the file, which the first graph writes; the others have them by the same names."""
        if values and not self._tensors:
            self._tensors = store_beside(values, self._path)
        for value in values:
            value.const_value = self._tensors[value.name]


def _derive(
    path: Path, out: Path, kind: ir.DataType, stored: _Constants, *, takes_trees: bool = False
) -> None:
    model = ir.load(path)
    graph = model.graph
    drop_query_padding(graph)
    is_sourced = any(value.name == SOURCE_LENGTH for value in graph.inputs)
    _give_lengths(graph, path.parent.name)
    if path.name == ENCODE_FILE:
        _write_from_zero(graph)
    if takes_trees:
        give_tree_inputs(graph, path.parent.name)
    if not is_sourced:
        lay_out_by_token(graph, path.parent.name)
        drop_unused(graph)
    if kind is not ir.DataType.FLOAT:
        _read_stored_halves(graph, kind)
        made = name_block_products(graph, kind) if kind is ir.DataType.BFLOAT16 else []
        made += HalfPass(
            graph, kind, path.parent.name, with_embeddings=False, with_residual=not is_sourced
        ).run()
        stored.store(made)
    _slice_unequal_parts(graph)
    drop_unused(graph)
    join_norms(graph)
    # Weights keep naming the data file of model.onnx: they were never read.
    ir.save(model, out)


def _give_lengths(graph: ir.Graph, where: str) -> None:
    """Let attention read lengths that are inputs: those of texts are added, those of sources are there.

    Raises:
        BundleError: attention reads neither a text nor a source by its length.
    """
    inputs = {value.name: value for value in graph.inputs}
    given: dict[AttentionKind | None, ir.Value] = {}
    if names.START in inputs:
        lengths = put_input(graph, names.LENGTHS, ir.DataType.INT64, ["batch"])
        given[AttentionKind.SELF] = lengths
    if SOURCE_LENGTH in inputs:
        given |= dict.fromkeys((AttentionKind.SOURCE, AttentionKind.ENCODER), inputs[SOURCE_LENGTH])
    for node in attention_nodes(graph):
        kind = attention_kind(node)
        if kind not in given:
            raise BundleError(f"{where}: an Attention node is not causal over a cache by lengths")
        if gives_scores(node):
            raise BundleError(f"{where}: attention with sinks has no graph for the CUDA provider")
        node.replace_input_with(LENGTHS, given[kind])


def _write_from_zero(graph: ir.Graph) -> None:
    """Compute the column that sources are written from, zero, on the device: the canonical graph does with a shape."""
    length = next(value for value in graph.inputs if value.name == SOURCE_LENGTH)
    zero = ir.node("Sub", [length, length])
    zero.outputs[0].name, zero.outputs[0].type = "first_column", length.type
    graph.insert_before(graph[0], zero)
    for node in graph:
        if node.op_type == "TensorScatter":
            node.replace_input_with(_WRITE_INDICES, zero.outputs[0])


def _slice_unequal_parts(graph: ir.Graph) -> None:
    """Cut by Slice what a Split cuts to unequal parts: for such it uploads tables in every call."""
    numbers: dict[int, ir.Value] = {}

    def number(value: int) -> ir.Value:
        if value not in numbers:
            numbers[value] = put(graph, np.array([value]), f"slice_at.{value}")
        return numbers[value]

    for node in list(graph):
        # A Split into equal parts may have no sizes.
        has_sizes = node.op_type == "Split" and len(node.inputs) > 1
        sizes = constant(node.inputs[1]) if has_sizes else None
        if sizes is None or len(set(sizes.tolist())) == 1:
            continue
        axis = number(node.attributes["axis"].as_int())
        ends = np.cumsum(sizes).tolist()
        for part, begin, end in zip(node.outputs, [0, *ends], ends, strict=False):
            cut = ir.node("Slice", [node.inputs[0], number(begin), number(end), axis])
            graph.insert_before(node, cut)
            take_over(part, cut.outputs[0])


def _read_stored_halves(graph: ir.Graph, kind: ir.DataType) -> None:
    """Replace the float32 copy of every weight stored as ``kind`` by the weight itself."""
    for node in list(graph):
        restored = node.outputs[0]
        if source(restored, "Cast") is None or node.inputs[0] is None:
            continue
        if node.inputs[0].is_initializer() and node.inputs[0].dtype is kind:
            restored.replace_all_uses_with(node.inputs[0])
