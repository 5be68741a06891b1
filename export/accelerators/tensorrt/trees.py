"""The graphs for trees that TensorRT's parser reads.

The graph that verifies is the canonical one with the positions and the mask of ``export.graph.trees``, not
``tree.onnx``, whose heads are grouped for the CPU. The graph that keeps a path is ``keep_path.onnx`` over caches of
one capacity and of the plan's type.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from outrider.engines.bundle.names import is_cache
from outrider.export.accelerators.tensorrt.graph import DATA_TYPES, derive_graph, fix_capacity
from outrider.export.graph.trees import give_tree_inputs


def derive_tree_graph(
    source: Path, out: Path, *, capacity: int, precision: str, source_capacity: int = 0
) -> None:
    """Write the graph that verifies trees to ``out``; arguments are those of ``derive_graph``.

    Raises:
        BundleError: as ``derive_graph``, or the graph has no positions.
    """

    def mask(graph: ir.Graph) -> None:
        give_tree_inputs(graph, source.parent.name)

    derive_graph(
        source,
        out,
        capacity=capacity,
        precision=precision,
        source_capacity=source_capacity,
        mask=mask,
    )


def derive_keep_graph(source: Path, out: Path, *, capacity: int, precision: str) -> None:
    """Write the graph that keeps a path to ``out``, from a bundle's ``keep_path.onnx``."""
    model = ir.load(source)
    fix_capacity(model.graph, capacity)
    kind = ir.TensorType(DATA_TYPES[precision])
    rows = [value for node in model.graph for value in node.outputs]
    for value in (*model.graph.inputs, *rows):
        if is_cache(value.name or ""):
            value.type = kind
    ir.save(model, out)
