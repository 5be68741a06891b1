"""Weights stored in 16 bits: half the file, computed with in float32 on the CPU.

Every matrix behind a product or an embedding becomes float16 or bfloat16 with a Cast to float32 beside it, which
ONNX Runtime folds when it loads the graph: the same kernels, the same speed and memory as float32,
with weights rounded to 11 or 8 bits. A checkpoint that is stored in the same type loses nothing. The graphs of
accelerators and ``outrider build`` read such weights without rounding them again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.export.graph.edits import put_tensor
from outrider.export.graph.position_tables import is_position_table
from outrider.export.progress import Steps, untold
from outrider.export.weights.widened import canonical_graphs, load_widened, save_over

FLOAT32, FLOAT16, BFLOAT16 = "float32", "float16", "bfloat16"
HALF_TYPES = {FLOAT16: ir.DataType.FLOAT16, BFLOAT16: ir.DataType.BFLOAT16}
"""Kinds of weights in 16 bits, and their types."""


def store_halves(path: Path, kind: str, report: Steps = untold) -> int:
    """Rewrite the graph at ``path`` with its matrices as ``kind``, one of ``HALF_TYPES``; return how many.

    ``path``.data is replaced too, and ``encode.onnx`` beside it, if there is one, is rewritten likewise. ``report`` is
    told of the constants that are written.

    Raises:
        BundleError: a weight is beyond the range of float16, or there is none.
    """
    total = 0
    for one in canonical_graphs(path):
        model = load_widened(one)
        matrices = [value for value in model.graph.initializers.values() if _is_matrix(value)]
        for value in matrices:
            _store(model.graph, value, kind, one.parent.name)
        if not matrices:
            raise BundleError(f"{one.parent.name}: no weight matrix in the graph")
        save_over(model, one, report)
        total += len(matrices)
    return total


def _is_matrix(value: ir.Value) -> bool:
    """Return whether a constant is a weight: a float32 matrix that a product or a lookup reads."""
    tensor = value.const_value
    if is_position_table(value.name):
        return False
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT or len(tensor.shape) != 2:
        return False
    operators = {node.op_type for node, _ in value.uses()}
    return bool(operators & {"MatMul", "Gemm", "Gather", "Transpose"})


def _store(graph: ir.Graph, value: ir.Value, kind: str, where: str) -> None:
    tensor, name, stored_type = value.const_value, f"{value.name}.{kind}", HALF_TYPES[kind]
    assert tensor is not None

    def rounded() -> ir.TensorProtocol:
        values = tensor.numpy()
        if kind == FLOAT16 and max(values.max(), -values.min()) > np.finfo(np.float16).max:
            raise BundleError(f"{where}: {value.name} is beyond the range of float16; use bfloat16")
        return ir.tensor(values.astype(stored_type.numpy()), dtype=stored_type)

    shape = ir.Shape(tensor.shape.numpy())
    stored = put_tensor(graph, ir.LazyTensor(rounded, stored_type, shape, name=name))
    node = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT.value})
    restored = node.outputs[0]
    restored.name, restored.type, restored.shape = f"{name}.restored", value.type, value.shape
    value.replace_all_uses_with(restored)
    graph.insert_before(graph[0], node)
    assert value.name is not None
    del graph.initializers[value.name]
