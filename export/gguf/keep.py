"""Weights of a GGUF file as its blocks have them, in standard ONNX.

Requires a canonical graph whose float32 constants are ``StoredTensor`` of a file's matrices, as products read them, and
the look-up of tokens, and shapes of what these read. Ensures the file's own integers instead, and no matrix in memory:

    y = x W        DequantizeLinear and MatMul in blocks along K, which ONNX Runtime fuses to MatMulNBits
                   + (sums of x over blocks) O, where a type has minimums: O [K / block, N] is what a block's zero is
    embedding      rows of integers, scales and minimums are gathered, multiplied and added: the very values;
                   columns of the head's own where both are one matrix of 8 bits without minimums

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
from outrider.export.weights.blocks import packed_tensor, split_gemms
from outrider.export.weights.stored import StoredTensor

_NIBBLE = 16.0
_MOVING = ("Gather", "Transpose")


def keep_blocks(graph: ir.Graph) -> int:
    """Store the matrices of a graph in place as their file has them; return how many nodes read such.

    Matrices that no product and no look-up reads as they are stay float32.
    """
    split_gemms(graph)
    products = [(node, _matrices(node.inputs[1])) for node in graph if node.op_type == "MatMul"]
    lookups = [
        (node, _matrices(node.inputs[0], is_turned=False))
        for node in graph
        if node.op_type == "Gather"
    ]
    heads: dict[int, list[ir.Value]] = {}
    for number, (node, matrices) in enumerate(products):
        if matrices:
            stored = _keep_product(graph, node, matrices, f"weight_{number}")
            if len(matrices) == 1 and len(stored) == 2 and stored[0].dtype is ir.DataType.INT8:
                heads[id(matrices[0])] = stored
    for number, (node, matrices) in enumerate(lookups):
        if len(matrices) == 1:
            head = heads.get(id(matrices[0]))
            _Lookup(graph, node, matrices[0], f"embedding_{number}").keep(head)
    drop_unused(graph)
    return sum(bool(matrices) for _, matrices in (*products, *lookups))


def _matrices(value: ir.Value | None, *, is_turned: bool = True) -> Sequence[GgufMatrix]:
    """Return the matrices behind a value, side by side as [K, N], or as rows; empty where there are none."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Transpose":
        value, is_turned = producer.inputs[0], not is_turned
    tensor = None if value is None else value.const_value
    if not isinstance(tensor, StoredTensor) or tensor.is_turned is not is_turned:
        return ()
    found = [one for one in tensor.weights if isinstance(one, GgufMatrix)]
    return found if len(found) == len(tensor.weights) else ()


class _Run:
    """Matrices of one layout side by side, decoded whenever a constant of them is written."""

    def __init__(self, matrices: Sequence[GgufMatrix]) -> None:
        self._matrices = matrices
        kind = BLOCK_TYPES[matrices[0].tensor.kind]
        self.bits, self.size, self.has_minimums = kind.bits, kind.size, kind.has_minimums
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
            return packed_tensor(whole, kind, name)

        is_whole = kind in (ir.DataType.INT4, ir.DataType.INT8)
        length = self.num_rows if is_whole else self.num_rows // self.size
        return ir.LazyTensor(made, kind, ir.Shape([length, self.num_columns]), name=name)


def _keep_product(
    graph: ir.Graph, node: ir.Node, matrices: Sequence[GgufMatrix], name: str
) -> list[ir.Value]:
    """Return the constants of all products that one becomes."""
    left, old = node.inputs[0], node.outputs[0]
    assert left is not None
    runs = [
        _Run(list(group)) for _, group in groupby(matrices, lambda one: _layout(one.tensor.kind))
    ]
    tape = _Tape(graph, node, name)
    stored: list[ir.Value] = []
    parts = [_product(tape, left, run, stored) for run in runs]
    made = parts[0]
    if len(parts) > 1:
        made = tape.add("Concat", parts, old.shape, {"axis": -1})
    take_over(old, made)
    graph.remove(node, safe=True)
    return stored


def _layout(name: str) -> tuple[object, ...]:
    kind = BLOCK_TYPES[name]
    return kind.bits, kind.size, kind.has_minimums


def _product(tape: _Tape, left: ir.Value, run: _Run, stored: list[ir.Value]) -> ir.Value:
    """Return the product with a run's matrices; its constants are added to those stored."""
    name = f"{tape.name}.{len(stored)}"
    kind = ir.DataType.INT4 if run.bits == 4 else ir.DataType.INT8

    def put(kind: ir.DataType, read: Callable[[QuantizedRows], Any], part: str) -> ir.Value:
        stored.append(put_tensor(tape.graph, run.lazily(kind, read, f"{name}.{part}")))
        return stored[-1]

    integers = put(kind, QuantizedRows.signed, "q")
    scales = put(ir.DataType.FLOAT, _scales, "scale")
    shape = ir.Shape([run.num_rows, run.num_columns])
    blocks = {"axis": 0, "block_size": run.size}
    restored = tape.add("DequantizeLinear", [integers, scales], shape, blocks)
    assert left.shape is not None
    axes = list(left.shape)[:-1]
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
    zeros = put(ir.DataType.FLOAT, QuantizedRows.zeros, "zero")
    offset = tape.add("MatMul", [sums, zeros], result)
    return tape.add("Add", [product, offset], result)


class _Lookup:
    """Looks tokens up among rows of integers, instead of a node that gathers rows of float32."""

    def __init__(self, graph: ir.Graph, node: ir.Node, matrix: GgufMatrix, name: str) -> None:
        ids = node.inputs[1]
        assert ids is not None and ids.shape is not None
        self._graph, self._node, self._ids, self._matrix = graph, node, ids, matrix
        self._run, self._tape = _Run([matrix]), _Tape(graph, node, name)
        self._axes = list(ids.shape)
        self._count = self._run.num_rows // self._run.size

    def keep(self, head: Sequence[ir.Value] | None) -> None:
        """Gather from constants of its own or, where given, from the head's [K, N] and [K / block, N]."""
        run, tape, width = self._run, self._tape, self._run.num_rows
        if head is None:
            integers = self._integers()
            parts = [self._rows(ir.DataType.FLOAT, self._count, _scales, "scale")]
            if run.has_minimums:
                parts.append(self._rows(ir.DataType.FLOAT, self._count, _minimums, "minimum"))
        else:
            integers = tape.float32(self._columns(head[0]))
            parts = [self._columns(head[1])]
        value = self._reshaped(integers, self._count, run.size)
        for op_type, part in zip(("Mul", "Add"), parts, strict=False):
            spread = tape.add(
                "Unsqueeze", [part, tape.number([-1])], ir.Shape([*self._axes, self._count, 1])
            )
            value = tape.add(op_type, [value, spread], value.shape)
        take_over(self._node.outputs[0], self._reshaped(value, width))
        self._graph.remove(self._node, safe=True)

    def _integers(self) -> ir.Value:
        """Return float32 [..., K]; of 4 bits two lie in a byte, one of the first half of K and one of the last."""
        tape, width, kind = self._tape, self._run.num_rows, ir.DataType.UINT8
        if self._run.bits == 4:
            pairs = tape.float32(self._rows(kind, width // 2, _paired, "q"))
            shifted = tape.add("Mul", [pairs, tape.number(1 / _NIBBLE)], pairs.shape)
            high = tape.add("Floor", [shifted], pairs.shape)
            raised = tape.add("Mul", [high, tape.number(_NIBBLE)], pairs.shape)
            low = tape.add("Sub", [pairs, raised], pairs.shape)
            whole = ir.Shape([*self._axes, width])
            found = tape.add("Concat", [low, high], whole, {"axis": -1})
        else:
            found = tape.float32(self._rows(kind, width, lambda rows: rows.integers, "q"))
        if self._run.has_minimums:
            return found
        middle = float(BLOCK_TYPES[self._matrix.tensor.kind].middle)
        return tape.add("Sub", [found, tape.number(middle)], found.shape)

    def _rows(
        self, kind: ir.DataType, length: int, read: Callable[[QuantizedRows], Any], part: str
    ) -> ir.Value:
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(read(self._matrix.rows()))),
            kind,
            ir.Shape([self._run.num_columns, length]),
            name=f"{self._tape.name}.{part}",
        )
        stored = put_tensor(self._graph, tensor)
        return self._tape.add("Gather", [stored, self._ids], ir.Shape([*self._axes, length]))

    def _columns(self, stored: ir.Value) -> ir.Value:
        assert stored.shape is not None
        length, rank = stored.shape[0], len(self._axes)
        found = self._tape.add(
            "Gather", [stored, self._ids], ir.Shape([length, *self._axes]), {"axis": 1}
        )
        turn = {"perm": [*range(1, rank + 1), 0]}
        return self._tape.add("Transpose", [found], ir.Shape([*self._axes, length]), turn)

    def _reshaped(self, value: ir.Value, *sizes: int) -> ir.Value:
        target = self._tape.number([*([0] * len(self._axes)), *sizes])
        return self._tape.add("Reshape", [value, target], ir.Shape([*self._axes, *sizes]))


def _scales(rows: QuantizedRows) -> Any:
    return rows.scales


def _minimums(rows: QuantizedRows) -> Any:
    return rows.minimums


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
        attributes: Mapping[str, int | list[int]] | None = None,
    ) -> ir.Value:
        """Return what a node makes: of the type of its first input where it only moves that, else float32."""
        kind = inputs[0].dtype if op_type in _MOVING else ir.DataType.FLOAT
        assert kind is not None
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
