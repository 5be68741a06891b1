"""The graphs that ONNX Runtime's CUDA provider runs, derived from a finished canonical graph.

``device.onnx`` is ``model.onnx`` with ``lengths`` as an input: what attention reads of each row's cache. The canonical
graph computes them as ``start`` plus the span's width, a shape. The provider computes with shapes on the host, so
``start`` would become an input of the host's, which IO binding copies once, when it is bound, and never again.
Attention stays causal by lengths, without a mask, as fused kernels want it. No query is padded: only the CPU promises
equal bits for spans of every length.

``device_tree.onnx`` verifies trees under a mask, ``device_keep_path.onnx`` moves a kept path; see
``export.graph.trees``. Heads are not grouped: that is for the CPU.

With a 16-bit precision caches and products have that type; norms, rotations and the residual stay float32. Fused
attention kernels take 16 bits alone. Matrices are read as ``export.weights.half_weights`` or ``blocks`` stores them;
what of them needs another type, such as the scales of blocks, is stored in ``device.onnx.data``.

Requires Attention that is causal over its cache. Ensures the same function up to rounding; no weight is stored twice
but blocks of integers where the precision is bfloat16 (``export.weights.block_products``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.export.graph.attention_kinds import (
    LENGTHS,
    AttentionKind,
    attention_kind,
    attention_nodes,
)
from outrider.export.graph.edits import constant, drop_unused, put, put_input, source, take_over
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.graph.trees import give_tree_inputs, keep_path_graph
from outrider.export.weights.block_products import name_block_products
from outrider.export.weights.half_products import HalfPass
from outrider.export.weights.half_weights import HALF_TYPES

FLOAT32 = "float32"
_KINDS = {FLOAT32: ir.DataType.FLOAT, **HALF_TYPES}
_DATA_FILE = f"{names.DEVICE_FILE}.data"


def derive_device_graphs(path: Path, precision: str, *, with_trees: bool) -> None:
    """Write the graphs of accelerators beside the canonical graph at ``path``.

    Args:
        path: of the canonical graph.
        precision: of caches and products: "float32", "float16" or "bfloat16".
        with_trees: write those that verify trees too.

    Raises:
        BundleError: an attention is not causal over its cache, a weight is beyond float16, or trees are asked of a
            graph without positions.
    """
    drop_device_graphs(path)
    kind, stored = _KINDS[precision], _Constants(path.with_name(_DATA_FILE))
    _derive(path, path.with_name(names.DEVICE_FILE), kind, stored, takes_trees=False)
    if with_trees:
        _derive(path, path.with_name(names.DEVICE_TREE_FILE), kind, stored, takes_trees=True)
        keeper = keep_path_graph(ir.load(path).graph, kind)
        ir.save(keeper, path.with_name(names.DEVICE_KEEP_PATH_FILE))


def drop_device_graphs(path: Path) -> None:
    """Remove the graphs of accelerators beside the canonical graph at ``path``, where there are any."""
    for name in (*names.DEVICE_FILES, _DATA_FILE):
        path.with_name(name).unlink(missing_ok=True)


class _Constants:
    """The constants of a model's graphs that are not among the canonical graph's, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str | None, ir.ExternalTensor] = {}

    def store(self, values: Sequence[ir.Value]) -> None:
        """Let values be those of the file, which the first graph writes; the others have them by the same names."""
        if values and not self._tensors:
            tensors = [value.const_value for value in values if value.const_value is not None]
            written = ir.external_data.convert_tensors_to_external(
                tensors, self._path.parent, self._path.name
            )
            self._tensors = {tensor.name: tensor for tensor in written}
        for value in values:
            value.const_value = self._tensors[value.name]


def _derive(
    path: Path, out: Path, kind: ir.DataType, stored: _Constants, *, takes_trees: bool
) -> None:
    model = ir.load(path)
    graph = model.graph
    drop_query_padding(graph)
    _give_lengths(graph, path.parent.name)
    if takes_trees:
        give_tree_inputs(graph, path.parent.name)
    if kind is not ir.DataType.FLOAT:
        _read_stored_halves(graph, kind)
        # ONNX Runtime makes the operator of blocks of other types itself.
        made = name_block_products(graph, kind) if kind is ir.DataType.BFLOAT16 else []
        made += HalfPass(graph, kind, path.parent.name, with_embeddings=False).run()
        stored.store(made)
    _slice_unequal_parts(graph)
    drop_unused(graph)
    # Weights keep naming the data file of model.onnx: they were never read.
    ir.save(model, out)


def _give_lengths(graph: ir.Graph, where: str) -> None:
    """Add lengths as an input, and replace those that attention computes from ``start``."""
    lengths = put_input(graph, names.LENGTHS, ir.DataType.INT64, ["batch"])
    for node in attention_nodes(graph):
        if attention_kind(node) is not AttentionKind.SELF:
            raise BundleError(f"{where}: an Attention node is not causal over a cache by lengths")
        node.replace_input_with(LENGTHS, lengths)


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
