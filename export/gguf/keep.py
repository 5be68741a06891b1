"""Weights of a GGUF file as its blocks have them, in standard ONNX.

Requires a canonical graph whose float32 constants are ``StoredTensor`` of a file's matrices, as products read them, and
the look-up of tokens. Ensures the file's own integers instead, and nothing of a matrix in memory:

    y = x W        DequantizeLinear and MatMul in blocks along K, which ONNX Runtime fuses to MatMulNBits
                   + (sums of x over blocks) O, where a type has minimums: O [K / block, N] is what a block's zero is
    embedding      rows of integers, scales and minimums are gathered, then multiplied and added: the file's very values

A product of matrices side by side whose types differ becomes one product for each run of equal types, and a Concat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.export.gguf.blocks import BLOCK_TYPES, QuantizedRows
from outrider.export.gguf.folder import GgufMatrix
from outrider.export.graph.edits import drop_unused, put, put_tensor, take_over
from outrider.export.weights.blocks import split_gemms
from outrider.export.weights.stored import StoredTensor

_NIBBLE = 16.0


def keep_blocks(graph: ir.Graph) -> int:
    """Store the matrices of a graph in place as their file has them; return how many nodes read such."""
    split_gemms(graph)
    count = 0
    for node in list(graph):
        if node.op_type == "MatMul":
            matrices = _matrices(node.inputs[1])
            if matrices:
                _keep_product(graph, node, matrices, f"weight_{count}")
                count += 1
        elif node.op_type == "Gather":
            matrices = _matrices(node.inputs[0], is_turned=False)
            if len(matrices) == 1:
                _keep_rows(graph, node, matrices[0], f"embedding_{count}")
                count += 1
    drop_unused(graph)
    return count


def _matrices(value: ir.Value | None, *, is_turned: bool = True) -> Sequence[GgufMatrix]:
    """Return the matrices behind a value, side by side as [K, N] or, not turned, as rows; empty where there are none."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Transpose":
        value, is_turned = producer.inputs[0], not is_turned
    tensor = None if value is None else value.const_value
    if not isinstance(tensor, StoredTensor) or tensor.is_turned is not is_turned:
        return ()
    return [one for one in tensor.weights if isinstance(one, GgufMatrix)]


class _Run:
    """Matrices of one form side by side, decoded whenever a constant of them is written."""

    def __init__(self, matrices: Sequence[GgufMatrix]) -> None:
        self._matrices = matrices
        form = BLOCK_TYPES[matrices[0].tensor.kind]
        self.bits, self.size, self.has_minimums = form.bits, form.size, form.has_minimums
        self.num_rows = matrices[0].shape[1]
        self.num_columns = sum(matrix.shape[0] for matrix in matrices)

    def lazily(
        self, kind: ir.DataType, read: Callable[[QuantizedRows], Any], name: str
    ) -> ir.TensorProtocol:
        """Return what ``read`` makes of each matrix [N, ...], side by side as [..., N]."""

        def made() -> ir.TensorProtocol:
            parts = [read(matrix.rows()) for matrix in self._matrices]
            whole = np.ascontiguousarray(np.concatenate(parts).T)
            if kind is not ir.DataType.INT4:
                return ir.tensor(whole, name=name)
            flat = whole.reshape(-1).view(np.uint8) & np.uint8(15)
            packed = flat[0::2] | (flat[1::2] << np.uint8(4))
            return ir.PackedTensor(packed, kind, shape=ir.Shape(whole.shape), name=name)

        is_whole = kind in (ir.DataType.INT4, ir.DataType.INT8)
        length = self.num_rows if is_whole else self.num_rows // self.size
        return ir.LazyTensor(made, kind, ir.Shape([length, self.num_columns]), name=name)


def _keep_product(
    graph: ir.Graph, node: ir.Node, matrices: Sequence[GgufMatrix], name: str
) -> None:
    left, old = node.inputs[0], node.outputs[0]
    assert left is not None
    runs = [
        _Run(list(group)) for _, group in groupby(matrices, lambda one: _form(one.tensor.kind))
    ]
    tape = _Tape(graph, node, name)
    parts = [_product(tape, left, run, number) for number, run in enumerate(runs)]
    made = parts[0]
    if len(parts) > 1:
        made = tape.add("Concat", parts, old.shape, {"axis": -1})
    take_over(old, made)
    graph.remove(node, safe=True)


def _form(kind: str) -> tuple[object, ...]:
    form = BLOCK_TYPES[kind]
    return form.bits, form.size, form.has_minimums


def _product(tape: _Tape, left: ir.Value, run: _Run, number: int) -> ir.Value:
    name = f"{tape.name}.{number}"
    kind = ir.DataType.INT4 if run.bits == 4 else ir.DataType.INT8
    stored = [
        put_tensor(tape.graph, run.lazily(kind, QuantizedRows.signed, f"{name}.q")),
        put_tensor(
            tape.graph, run.lazily(ir.DataType.FLOAT, lambda rows: rows.scales, f"{name}.scale")
        ),
    ]
    shape = ir.Shape([run.num_rows, run.num_columns])
    blocks = {"axis": 0, "block_size": run.size}
    restored = tape.add("DequantizeLinear", stored, shape, blocks)
    axes = [] if left.shape is None else list(left.shape)[:-1]
    result = ir.Shape([*axes, run.num_columns])
    product = tape.add("MatMul", [left, restored], result)
    if not run.has_minimums:
        return product
    count = run.num_rows // run.size
    target = [*([0] * len(axes)), count, run.size]
    in_blocks = tape.add("Reshape", [left, tape.number(target)], ir.Shape([*axes, count, run.size]))
    sums = tape.add(
        "ReduceSum", [in_blocks, tape.number([-1])], ir.Shape([*axes, count]), {"keepdims": 0}
    )
    zeros = put_tensor(tape.graph, run.lazily(ir.DataType.FLOAT, QuantizedRows.zeros, f"{name}.zero"))
    offset = tape.add("MatMul", [sums, zeros], result)
    return tape.add("Add", [product, offset], result)


def _keep_rows(graph: ir.Graph, node: ir.Node, matrix: GgufMatrix, name: str) -> None:
    """Look tokens up among rows of integers, two to a byte where they are of 4 bits: the first of K and the last."""
    ids, old = node.inputs[1], node.outputs[0]
    assert ids is not None
    run, tape = _Run([matrix]), _Tape(graph, node, name)
    axes = [] if ids.shape is None else list(ids.shape)
    width, count = run.num_rows, run.num_rows // run.size
    whole = ir.Shape([*axes, width])

    def gathered(
        kind: ir.DataType, length: int, read: Callable[[QuantizedRows], Any], part: str
    ) -> ir.Value:
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(read(matrix.rows()))),
            kind,
            ir.Shape([run.num_columns, length]),
            name=f"{name}.{part}",
        )
        return tape.add("Gather", [put_tensor(graph, tensor), ids], ir.Shape([*axes, length]))

    if run.bits == 4:
        pairs = tape.float32(gathered(ir.DataType.UINT8, width // 2, _paired, "q"))
        halves = pairs.shape
        tens = tape.add("Mul", [pairs, tape.number(1 / _NIBBLE)], halves)
        high = tape.add("Floor", [tens], halves)
        both = tape.add("Mul", [high, tape.number(_NIBBLE)], halves)
        low = tape.add("Sub", [pairs, both], halves)
        integers = tape.add("Concat", [low, high], whole, {"axis": -1})
    else:
        integers = tape.float32(gathered(ir.DataType.UINT8, width, lambda rows: rows.integers, "q"))
    if not run.has_minimums:
        middle = float(BLOCK_TYPES[matrix.tensor.kind].middle)
        integers = tape.add("Sub", [integers, tape.number(middle)], whole)
    in_blocks = ir.Shape([*axes, count, run.size])
    value = tape.add(
        "Reshape", [integers, tape.number([*([0] * len(axes)), count, run.size])], in_blocks
    )
    one = ir.Shape([*axes, count, 1])

    def spread(read: Callable[[QuantizedRows], Any], part: str) -> ir.Value:
        found = gathered(ir.DataType.FLOAT, count, read, part)
        return tape.add("Unsqueeze", [found, tape.number([-1])], one)

    value = tape.add("Mul", [value, spread(lambda rows: rows.scales, "scale")], in_blocks)
    if run.has_minimums:
        value = tape.add("Add", [value, spread(lambda rows: rows.minimums, "minimum")], in_blocks)
    made = tape.add("Reshape", [value, tape.number([*([0] * len(axes)), width])], whole)
    take_over(old, made)
    graph.remove(node, safe=True)


def _paired(rows: QuantizedRows) -> npt.NDArray[np.uint8]:
    first, last = np.split(rows.integers, 2, axis=1)
    return first | (last << np.uint8(4))


class _Tape:
    """Adds nodes in front of another, with names, types and shapes."""

    def __init__(self, graph: ir.Graph, before: ir.Node, name: str) -> None:
        self.graph, self.name = graph, name
        self._before, self._count = before, 0

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        shape: ir.Shape | None,
        attributes: Mapping[str, int] | None = None,
        kind: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        if op_type == "Gather":
            assert inputs[0].dtype is not None
            kind = inputs[0].dtype
        node = ir.node(op_type, inputs, attributes=attributes)
        made = node.outputs[0]
        made.name, made.type, made.shape = self._next(), ir.TensorType(kind), shape
        self.graph.insert_before(self._before, node)
        return made

    def float32(self, value: ir.Value) -> ir.Value:
        return self.add("Cast", [value], value.shape, {"to": ir.DataType.FLOAT.value})

    def number(self, value: float | Sequence[int]) -> ir.Value:
        kind = np.float32 if isinstance(value, float) else np.int64
        return put(self.graph, np.array(value, kind), self._next())

    def _next(self) -> str:
        self._count += 1
        return f"{self.name}.step_{self._count}"
