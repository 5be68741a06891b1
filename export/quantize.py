"""Weights in 8 or 4 bits, in standard ONNX: DequantizeLinear in blocks of 32 along K.

Requires a canonical graph whose MatMul weights are constants [K, N] (possibly behind a Transpose).
Ensures the same graph with those weights stored as integers, float32 scales beside them; ONNX
Runtime fuses the pair to MatMulNBits. Embeddings stay as they are; a head that shares its weight
with the embedding gets a copy of its own, so the lookup stays exact.

Source: ONNX DequantizeLinear-21, blocked quantisation; symmetric, scale = max|w| / (2^(bits-1) - 1).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from engines.base import BundleError, FloatArray
from export.graph_edits import drop_unused, put, put_tensor

BLOCK_SIZE = 32
BITS = {"int8": 8, "int4": 4}


def quantize_blocks(weight: FloatArray, bits: int) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Integers [K, N] int8 and scales [K / 32, N] float32 of a weight [K, N] float32.

    ``integers * scale`` of its block is within half a scale of the weight. K is a multiple of 32.
    """
    num_rows, num_columns = weight.shape
    blocks = weight.reshape(num_rows // BLOCK_SIZE, BLOCK_SIZE, num_columns)
    greatest = 2 ** (bits - 1) - 1
    scales = np.abs(blocks).max(axis=1) / greatest
    scales = np.where(scales == 0, 1, scales).astype(np.float32)
    integers = np.clip(np.rint(blocks / scales[:, None]), -greatest, greatest)
    return integers.astype(np.int8).reshape(weight.shape), scales


def dequantize_blocks(integers: npt.NDArray[np.int8], scales: FloatArray) -> FloatArray:
    """Weight [K, N] float32 that the graph computes with."""
    return integers.astype(np.float32) * np.repeat(scales, BLOCK_SIZE, axis=0)


def quantize_file(path: Path, kind: str) -> int:
    """Rewrite the graph at ``path`` with its MatMul weights as ``kind``; returns how many.

    Args:
        path: canonical graph with float32 weights in ``path``.data; both are replaced.
        kind: "int8" or "int4".

    Raises:
        BundleError: no weight could be quantised.
    """
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    count = quantize_graph(model, BITS[kind])
    if count == 0:
        raise BundleError(f"{path.name}: no MatMul weight with K a multiple of {BLOCK_SIZE}")
    ir.save(model, path, external_data=f"{path.name}.data")
    return count


def quantize_graph(model: ir.Model, bits: int) -> int:
    """Quantise every MatMul weight of the graph in place; returns how many."""
    graph, done = model.graph, 0
    split_gemms(graph)
    for node in list(graph):
        if node.op_type != "MatMul":
            continue
        weight = constant_weight(node.inputs[1])
        if weight is None or weight.shape[0] % BLOCK_SIZE:
            continue
        _replace_weight(graph, node, weight, bits, f"weight_{done}")
        done += 1
    drop_unused(graph)
    return done


def split_gemms(graph: ir.Graph) -> None:
    """Write x @ W + b as MatMul and Add where Gemm does no more.

    ONNX Runtime fuses quantised weights into MatMul only.
    """
    for node in list(graph):
        if node.op_type == "Gemm":
            _split_gemm(graph, node)


def _split_gemm(graph: ir.Graph, node: ir.Node) -> None:
    attributes = node.attributes
    is_scaled = any(attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    weight = node.inputs[1]
    if is_scaled or attributes.get_int("transA", 0) or weight is None:
        return
    old, added = node.outputs[0], []
    if attributes.get_int("transB", 0):
        added.append(ir.node("Transpose", [weight], attributes={"perm": [1, 0]}))
        weight = added[0].outputs[0]
    product = ir.node("MatMul", [node.inputs[0], weight])
    added.append(product)
    # The exporter leaves a bias of zeros away.
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        added.append(ir.node("Add", [product.outputs[0], node.inputs[2]]))
    for part in added:
        part.outputs[0].name = f"{old.name}.{part.op_type}"
        part.outputs[0].type = old.type
    graph.insert_before(node, added)
    for value in (product.outputs[0], added[-1].outputs[0]):
        value.shape = old.shape
    old.replace_all_uses_with(added[-1].outputs[0])
    graph.remove(node, safe=True)


def constant_weight(value: ir.Value | None) -> FloatArray | None:
    """Two-dimensional float32 constant behind a value, through one Transpose; else None."""
    if value is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        inner = constant_weight(producer.inputs[0])
        return None if inner is None else np.ascontiguousarray(inner.T)
    if value.const_value is None or not value.is_initializer():
        return None
    weight = value.const_value.numpy()
    return weight if weight.ndim == 2 and weight.dtype == np.float32 else None


def _replace_weight(
    graph: ir.Graph, node: ir.Node, weight: FloatArray, bits: int, name: str
) -> None:
    integers, scales = quantize_blocks(weight, bits)
    stored = put_tensor(graph, _integer_tensor(integers, bits, f"{name}.q"))
    scale = put(graph, scales, f"{name}.scale")
    restore = ir.node(
        "DequantizeLinear", [stored, scale], attributes={"axis": 0, "block_size": BLOCK_SIZE}
    )
    restore.outputs[0].name = f"{name}.restored"
    restore.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    restore.outputs[0].shape = ir.Shape(weight.shape)
    graph.insert_before(node, restore)
    node.replace_input_with(1, restore.outputs[0])


def _integer_tensor(integers: npt.NDArray[np.int8], bits: int, name: str) -> ir.TensorProtocol:
    if bits == 8:
        return ir.tensor(integers, name=name)
    nibbles = (integers.reshape(-1) & 0xF).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    packed = nibbles[0::2] | (nibbles[1::2] << 4)
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape(integers.shape), name=name)
