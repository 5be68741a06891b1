"""Weights stored in 16 bits, computed with in 16 bits: the graph for accelerators.

``half.onnx`` is ``model.onnx`` of a bundle with float16 weights, over the same weights: products read
them as they are stored, and caches are float16. Attention stays causal by lengths, without a mask, as
the fused kernels of ONNX Runtime's CUDA provider want it; those take 16 bits alone.

Requires weights as ``export.weights.half_weights`` stores them. Ensures the same function up to 16-bit
rounding. No query is padded: only the CPU promises equal bits for spans of every length.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from outrider.engines.bundle.manifest import HALF_FILE
from outrider.export.graph.edits import drop_unused, source
from outrider.export.graph.narrow_spans import drop_query_padding
from outrider.export.weights.half_products import HalfPass


def derive_half_graph(path: Path) -> None:
    """Write ``half.onnx`` beside the canonical graph at ``path``, whose weights are float16."""
    model = ir.load(path)
    drop_query_padding(model.graph)
    _read_stored_halves(model.graph)
    HalfPass(model.graph, ir.DataType.FLOAT16, path.parent.name).run()
    drop_unused(model.graph)
    # Weights keep naming the data file of model.onnx: they were never read.
    ir.save(model, path.with_name(HALF_FILE))


def _read_stored_halves(graph: ir.Graph) -> None:
    """Replace the float32 copy of every stored weight by the weight itself."""
    for node in list(graph):
        restored = node.outputs[0]
        if source(restored, "Cast") is None or node.inputs[0] is None:
            continue
        if node.inputs[0].is_initializer() and node.inputs[0].dtype is ir.DataType.FLOAT16:
            restored.replace_all_uses_with(node.inputs[0])
