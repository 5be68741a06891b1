"""The graphs for trees that TensorRT's parser is given, derived as those for chains are.

The graph that verifies is the canonical one with the positions and the mask of ``export.graph.trees``; it
is derived anew, not from ``tree.onnx``, whose heads are grouped for the CPU. The graph that keeps a path
is ``keep_path.onnx`` over caches of one capacity and of the plan's type.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from outrider.export.graph.trees import give_tree_inputs
from outrider.export.tensorrt.graph import DATA_TYPES, derive_graph, fix_capacity
from outrider.export.weights.half_products import is_cache


def derive_tree_graph(source: Path, out: Path, *, capacity: int, precision: str) -> None:
    """Write the graph that verifies trees to ``out``, with its weights in ``out``.data.

    Args:
        source: canonical graph of a bundle.
        out: file to write in an existing folder.
        capacity: S of every cache tensor.
        precision: one of ``export.tensorrt.graph.PRECISIONS``.

    Raises:
        BundleError: as ``derive_graph``, or the graph knows no positions.
    """
    derive_graph(
        source,
        out,
        capacity=capacity,
        precision=precision,
        mask=lambda graph: give_tree_inputs(graph, source.parent.name),
    )


def derive_keep_graph(source: Path, out: Path, *, capacity: int, precision: str) -> None:
    """Write the graph that keeps a path to ``out``.

    Args:
        source: ``keep_path.onnx`` of a bundle.
        out: file to write in an existing folder.
        capacity: S of every cache tensor.
        precision: as above; what moves is of the caches' type.
    """
    model = ir.load(source)
    fix_capacity(model.graph, capacity)
    kind = ir.TensorType(DATA_TYPES[precision])
    rows = [value for node in model.graph for value in node.outputs]
    for value in (*model.graph.inputs, *rows):
        if is_cache(value.name or ""):
            value.type = kind
    ir.save(model, out)
