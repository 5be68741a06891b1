"""Weights of matrix products in 8 bits of floating point (E4M3), for GPUs that compute with them.

One scale per output column, so that its greatest weight is E4M3's greatest number. Activations, caches
and everything else stay as the 16-bit graph has them: nothing has to be calibrated. Standard
``DequantizeLinear``, so ONNX Runtime runs the same graph and tests hold it against the others.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.export.graph.edits import put

FLOAT8 = "float8"
# The first GPUs with 8-bit floats (Ada); Hopper is 9.0.
LEAST_CAPABILITY = "8.9"
_KIND = ml_dtypes.float8_e4m3fn
# Greatest number of E4M3 (Micikevicius et al. 2022, arXiv 2209.05433, table 1).
_GREATEST = 448.0
# Greatest weight of a column of zeros.
_SMALLEST = 1e-6


def narrow_weights(graph: ir.Graph, where: str) -> None:
    """Store every 16-bit matrix that only matrix products read in 8 bits, in place.

    ``where`` names the graph in errors.

    Raises:
        BundleError: there is no such matrix: the weights are quantised already.
    """
    products = [node for node in graph if node.op_type == "MatMul" and _is_weight(node.inputs[1])]
    if not products:
        raise BundleError(
            f"{where}: no 16-bit weights to store as {FLOAT8}; weights in blocks of integers are "
            "built with --precision float16"
        )
    for node in products:
        weight = node.inputs[1]
        assert weight is not None
        if weight.is_initializer():
            node.replace_input_with(1, _narrow(graph, weight, node))


def _is_weight(value: ir.Value | None) -> bool:
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    users = {node.op_type for node in value.consumers()}
    is_matrix = len(value.const_value.shape) == 2
    return is_matrix and value.dtype is ir.DataType.FLOAT16 and users == {"MatMul"}


def _narrow(graph: ir.Graph, weight: ir.Value, before: ir.Node) -> ir.Value:
    """Return the weight [K, N] dequantised from 8 bits, by a node before another."""
    assert weight.const_value is not None
    values = weight.const_value.numpy().astype(np.float32)
    scales = np.maximum(np.abs(values).max(axis=0), _SMALLEST) / _GREATEST
    # Weights are divided by the scales as stored, since they are multiplied with those.
    scales = scales.astype(np.float16)
    stored = np.clip(values / scales.astype(np.float32), -_GREATEST, _GREATEST).astype(_KIND)
    inputs = [
        put(graph, stored, f"{weight.name}.{FLOAT8}"),
        put(graph, scales, f"{weight.name}.scales"),
    ]
    node = ir.node("DequantizeLinear", inputs, attributes={"axis": 1})
    result = node.outputs[0]
    result.name = f"{weight.name}.restored"
    result.type = ir.TensorType(ir.DataType.FLOAT16)
    graph.insert_before(before, node)
    return result
