"""Products with integer blocks as ONNX Runtime's own operator, for accelerators that compute in bfloat16.

``DequantizeLinear`` and ``MatMul`` in float32 or float16 become this operator when ONNX Runtime loads the graph; in
bfloat16 they do not, and its CUDA provider has no blocked ``DequantizeLinear`` of bfloat16 (1.31.1). So the graph of
accelerators names the operator itself. Its layout is another than the standard one:

    DequantizeLinear   integers [K, N] signed               scales [K / block, N]
    MatMulNBits        integers [N, K / block, block] + 2^(bits - 1), low bits first    scales [N, K / block]

so these integers are stored a second time. To be removed when the fusion takes bfloat16.

Source: ONNX Runtime, contrib operator com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.export.graph.edits import put_tensor, source

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
_BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4}


def name_block_products(graph: ir.Graph, kind: ir.DataType) -> list[ir.Value]:
    """Make products with integer blocks ``MatMulNBits`` with scales of ``kind``, in place; return the new constants.

    Each is computed anew whenever it is read, so that no two are in memory.
    """
    made: list[ir.Value] = []
    for node in graph:
        blocks = source(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
        if blocks is None or blocks.attributes.get_int("block_size", 0) == 0:
            continue
        integers, scales = (_tensor(value) for value in blocks.inputs)
        num_rows, num_columns = integers.shape.numpy()
        bits, num_blocks = _BITS[integers.dtype], scales.shape.numpy()[0]
        size = num_rows // num_blocks
        packed = partial(_packed, integers, bits, size)
        shape = (num_columns, num_blocks, size * bits // 8)
        name = blocks.outputs[0].name
        constants = [
            _put_lazily(graph, packed, ir.DataType.UINT8, shape, f"{name}.packed"),
            _put_lazily(graph, partial(_turned, scales, kind), kind, shape[:2], f"{name}.scales"),
        ]
        node.domain, node.op_type = DOMAIN, OPERATOR
        node.resize_inputs(3)
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
    raised: npt.NDArray[np.uint8] = integers.numpy().astype(np.uint8).T + np.uint8(1 << (bits - 1))
    if bits == 4:
        raised = raised[:, 0::2] | (raised[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(raised).reshape(len(raised), -1, size * bits // 8)


def _turned(scales: ir.TensorProtocol, kind: ir.DataType) -> npt.NDArray[Any]:
    """Return scales [K / block, N] as [N, K / block] of another type."""
    return np.ascontiguousarray(scales.numpy().T).astype(kind.numpy())


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
