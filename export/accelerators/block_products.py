"""Products with integer blocks as ONNX Runtime's own operator, for accelerators that compute in bfloat16.

``DequantizeLinear`` and ``MatMul`` in float32 or float16 become this operator when ONNX Runtime loads the graph; in
bfloat16 they do not, and its CUDA provider has no blocked ``DequantizeLinear`` of bfloat16 (1.31.1). So the graph of
accelerators names the operator itself. Its layout is another than the standard one:

    DequantizeLinear   integers [K, N] signed               scales [K / block, N]
    MatMulNBits        integers [N, K / block, block] + 2^(bits - 1), low bits first    scales [N, K / block]

Unsigned integers have zero points [K / block, N], and lie as they are; their zero points are rows [N, K / block] of
bits, each filled up to a whole byte.

These integers are stored a second time. To be removed when the fusion takes bfloat16.

Source: ONNX Runtime, contrib operator com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.export.graph.edits import folded, put_tensor, source

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
_BITS = {
    ir.DataType.INT8: 8,
    ir.DataType.INT4: 4,
    ir.DataType.UINT8: 8,
    ir.DataType.UINT4: 4,
}
_SIGNED = (ir.DataType.INT8, ir.DataType.INT4)


def name_block_products(graph: ir.Graph, kind: ir.DataType) -> list[ir.Value]:
    """Make products with integer blocks ``MatMulNBits`` with scales of ``kind``, in place; return the new constants.

    Integers are computed anew whenever they are read, so that no two are in memory.
    """
    made: list[ir.Value] = []
    for node in graph:
        blocks = source(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
        if blocks is None or blocks.attributes.get_int("block_size", 0) == 0:
            continue
        integers, *zero_points = (
            _tensor(value) for value in (blocks.inputs[0], *blocks.inputs[2:])
        )
        num_rows, num_columns = integers.shape.numpy()
        bits, scales = _BITS[integers.dtype], blocks.inputs[1]
        num_blocks = num_rows // blocks.attributes.get_int("block_size", 0)
        size = num_rows // num_blocks
        packed = partial(_packed, integers, bits, size)
        shape = (num_columns, num_blocks, size * bits // 8)
        name = blocks.outputs[0].name
        constants = [
            _put_lazily(graph, packed, ir.DataType.UINT8, shape, f"{name}.packed"),
            # At once: the nodes that compute them go.
            put_tensor(graph, ir.tensor(_turned(scales, kind), dtype=kind, name=f"{name}.scales")),
        ]
        for zeros in zero_points:
            filled = partial(_packed_zeros, zeros, bits)
            width = -(-num_blocks * bits // 8)
            constants.append(
                _put_lazily(graph, filled, ir.DataType.UINT8, (num_columns, width), f"{name}.zeros")
            )
        node.domain, node.op_type = DOMAIN, OPERATOR
        node.resize_inputs(1 + len(constants))
        for place, value in enumerate(constants, start=1):
            node.replace_input_with(place, value)
        sizes = {"K": num_rows, "N": num_columns, "bits": bits, "block_size": size}
        for key, number in sizes.items():
            node.attributes.add(ir.AttrInt64(key, number))
        made += constants
    if made:
        graph.opset_imports[DOMAIN] = 1
    return made


def _tensor(value: ir.Value | None) -> ir.TensorProtocol:
    assert value is not None and value.const_value is not None
    return value.const_value


def _packed(integers: ir.TensorProtocol, bits: int, size: int) -> npt.NDArray[np.uint8]:
    """Return integers [K, N] as bytes [N, K / size, size * bits / 8]."""
    raised: npt.NDArray[np.uint8] = integers.numpy().astype(np.uint8).T
    if integers.dtype in _SIGNED:
        raised = raised + np.uint8(1 << (bits - 1))
    return _bytes(raised, bits).reshape(len(raised), -1, size * bits // 8)


def _packed_zeros(zero_points: ir.TensorProtocol, bits: int) -> npt.NDArray[np.uint8]:
    """Return zero points [K / block, N] as bytes [N, bytes of K / block]."""
    turned: npt.NDArray[np.uint8] = zero_points.numpy().astype(np.uint8).T
    return _bytes(np.pad(turned, ((0, 0), (0, turned.shape[1] % 2))) if bits == 4 else turned, bits)


def _bytes(integers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return rows of integers as bytes, low bits first."""
    if bits == 4:
        integers = (integers[:, 0::2] & np.uint8(0xF)) | (integers[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(integers)


def _turned(scales: ir.Value | None, kind: ir.DataType) -> npt.NDArray[Any]:
    """Return scales [K / block, N] as [N, K / block] of another type."""
    return np.ascontiguousarray(folded(scales).T).astype(kind.numpy())


def _put_lazily(
    graph: ir.Graph,
    compute: Callable[[], npt.NDArray[Any]],
    kind: ir.DataType,
    shape: Sequence[int],
    name: str,
) -> ir.Value:
    def tensor() -> ir.TensorProtocol:
        return ir.tensor(compute(), dtype=kind, name=name)

    return put_tensor(graph, ir.LazyTensor(tensor, kind, ir.Shape(shape), name=name))
