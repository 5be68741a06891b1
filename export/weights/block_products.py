"""Products with integer blocks as ONNX Runtime's own operator, in graphs that are made for one of its providers.

``DequantizeLinear`` and ``MatMul`` in float32 or float16 become this operator when ONNX Runtime loads the graph. On the
CPU that turns every block and widens every scale at every start, in memory that stays taken, and it does not happen
where Relu follows (1.31.1); in bfloat16 it does not happen at all, and the CUDA provider has no blocked
``DequantizeLinear`` of it. So the CPU's own graphs, and those of accelerators in bfloat16, name the operator
themselves. Its layout is another than the standard one:

    DequantizeLinear   integers [K, N] signed               scales [K / block, N]
    MatMulNBits        integers [N, K / block, block] + 2^(bits - 1), low bits first    scales [N, K / block]

Unsigned integers have zero points [K / block, N], and lie as they are; their zero points are rows [N, K / block] of
bits, each filled up to a whole byte.

These integers are stored a second time, beside the graph.

Source: ONNX Runtime, contrib operator com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from outrider.export.graph.edits import drop_unused, folded, put_tensor, source

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
ACCURACY, _EXACT, _IN_8_BITS = "accuracy_level", 1, 4
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


def save_for_cpu(model: ir.Model, path: Path, *, over: Path | None = None) -> None:
    """Write a graph derived from the canonical one, whose products with blocks the CPU takes as they are, to ``path``.

    They multiply in 8 bits, as those that ONNX Runtime makes for an engine. Blocks and scales are written to
    ``path``.data, or named as the graph ``over``, which was written so before, does. All other weights keep naming the
    data file of ``model.onnx``.
    """
    data = path.with_name(f"{path.name}.data")
    made = name_block_products(model.graph, ir.DataType.FLOAT)
    data.unlink(missing_ok=True)
    if made:
        drop_unused(model.graph)
        for node in model.graph:
            if node.op_type == OPERATOR:
                node.attributes.add(ir.AttrInt64(ACCURACY, _IN_8_BITS))
        if over is None:
            store_beside(made, data)
        else:
            stored = ir.load(over).graph.initializers
            for value in made:
                value.const_value = stored[str(value.name)].const_value
    ir.save(model, path)


def store_beside(values: Sequence[ir.Value], data: Path) -> dict[str | None, ir.ExternalTensor]:
    """Write constants to a file, which they then name, and return them by name."""
    tensors = [value.const_value for value in values if value.const_value is not None]
    written = ir.external_data.convert_tensors_to_external(tensors, data.parent, data.name)
    stored: dict[str | None, ir.ExternalTensor] = {tensor.name: tensor for tensor in written}
    for value in values:
        value.const_value = stored[value.name]
    return stored


def with_exact_blocks(graph: Path | bytes) -> bytes:
    """Return a graph, of a file or serialised, with products that multiply in float32, not in 8 bits."""
    serialised = graph.read_bytes() if isinstance(graph, Path) else graph
    model = onnx.load_model_from_string(serialised)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == OPERATOR and attribute.name == ACCURACY:
                attribute.i = _EXACT
    return model.SerializeToString()


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
