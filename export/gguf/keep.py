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

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir
from outrider.export.gguf.blocks import BLOCK_TYPES, Factors, QuantizedRows
from outrider.export.gguf.folder import GgufMatrix
from outrider.export.graph.edits import drop_unused, put_tensor, take_over
from outrider.export.weights.blocks import packed_tensor, split_gemms
from outrider.export.weights.lookup import (
    TableRows,
    Tape,
    look_up_columns,
    look_up_rows,
    token_lookups,
)
from outrider.export.weights.stored import StoredTensor


def keep_blocks(graph: ir.Graph) -> int:
    """Store the matrices of a graph in place as their file has them; return how many nodes read such.

    Matrices that no product and no look-up reads as they are stay float32.
    """
    split_gemms(graph)
    products = [(node, _matrices(node.inputs[1])) for node in graph if node.op_type == "MatMul"]
    lookups = [(node, _matrices(node.inputs[0], is_turned=False)) for node in token_lookups(graph)]
    heads: dict[int, list[ir.Value]] = {}
    for number, (node, matrices) in enumerate(products):
        if matrices:
            stored = _keep_product(graph, node, matrices, f"weight_{number}")
            has_minimums = BLOCK_TYPES[matrices[0].tensor.kind].has_minimums
            if len(matrices) == 1 and stored[0].dtype is ir.DataType.INT8 and not has_minimums:
                heads[id(matrices[0])] = stored
    for number, (node, matrices) in enumerate(lookups):
        if len(matrices) == 1:
            head, name = heads.get(id(matrices[0])), f"embedding_{number}"
            if head is None:
                look_up_rows(graph, node, _table(matrices[0]), name)
            else:
                look_up_columns(graph, node, head, name)
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
        self.middle, self._num_together = kind.middle, kind.num_together
        self.num_rows = matrices[0].shape[1]
        self.num_columns = sum(matrix.shape[0] for matrix in matrices)

    def integers(self, name: str) -> ir.TensorProtocol:
        """Return signed integers [K, N]."""
        kind = ir.DataType.INT4 if self.bits == 4 else ir.DataType.INT8
        return self._lazily(kind, QuantizedRows.signed, self.num_rows, name, is_turned=True)

    def factors(
        self, read: Callable[[QuantizedRows], Factors], name: str, *, is_turned: bool
    ) -> list[ir.TensorProtocol]:
        """Return factors of scales or minimums, [K / block, N] or, not turned, [N, K / block]."""
        kinds, count = [ir.DataType.FLOAT16], self.num_rows // self.size
        lengths = [count]
        if self._num_together > 1:
            kinds, lengths = [ir.DataType.INT8, *kinds], [count, count // self._num_together]

        def part(number: int) -> Callable[[QuantizedRows], Any]:
            return lambda rows: read(rows)[number]

        return [
            self._lazily(kind, part(number), length, f"{name}.{number}", is_turned=is_turned)
            for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
        ]

    def _lazily(
        self,
        kind: ir.DataType,
        read: Callable[[QuantizedRows], Any],
        length: int,
        name: str,
        *,
        is_turned: bool,
    ) -> ir.TensorProtocol:
        """Return what ``read`` makes of each matrix [N, length], as [length, N] side by side or as rows."""

        def made() -> ir.TensorProtocol:
            whole = np.concatenate([read(matrix.rows()) for matrix in self._matrices])
            whole = np.ascontiguousarray(whole.T if is_turned else whole)
            if kind is not ir.DataType.INT4:
                return ir.tensor(whole, name=name)
            return packed_tensor(whole, kind, name)

        shape = [length, self.num_columns] if is_turned else [self.num_columns, length]
        return ir.LazyTensor(made, kind, ir.Shape(shape), name=name)


def _keep_product(
    graph: ir.Graph, node: ir.Node, matrices: Sequence[GgufMatrix], name: str
) -> list[ir.Value]:
    """Return the constants of all products that one becomes."""
    left, old = node.inputs[0], node.outputs[0]
    assert left is not None
    runs = [
        _Run(list(group)) for _, group in groupby(matrices, lambda one: _layout(one.tensor.kind))
    ]
    tape = Tape(graph, node, name)
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
    return kind.bits, kind.size, kind.has_minimums, kind.num_together


def _product(tape: Tape, left: ir.Value, run: _Run, stored: list[ir.Value]) -> ir.Value:
    """Return the product with a run's matrices; its constants are added to those stored."""
    name = f"{tape.name}.{len(stored)}"

    def put(tensors: Sequence[ir.TensorProtocol]) -> list[ir.Value]:
        values = [put_tensor(tape.graph, one) for one in tensors]
        stored.extend(values)
        return values

    integers = put([run.integers(f"{name}.q")])
    scales = tape.multiplied(put(run.factors(_scales, f"{name}.scale", is_turned=True)), axis=0)
    shape = ir.Shape([run.num_rows, run.num_columns])
    blocks = {"axis": 0, "block_size": run.size}
    restored = tape.add("DequantizeLinear", [*integers, scales], shape, blocks)
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
    minimums = put(run.factors(_minimums, f"{name}.minimum", is_turned=True))
    # What signed integers of zero stand for.
    raised = tape.add("Mul", [scales, tape.number(float(run.middle))], scales.shape)
    zeros = tape.add("Add", [tape.multiplied(minimums, axis=0), raised], scales.shape)
    offset = tape.add("MatMul", [sums, zeros], result)
    return tape.add("Add", [product, offset], result)


def _table(matrix: GgufMatrix) -> TableRows:
    """Return a matrix as rows to look tokens up in."""
    run = _Run([matrix])
    return TableRows(
        shape=(run.num_columns, run.num_rows),
        bits=run.bits,
        integers=lambda: matrix.rows().integers,
        middle=0 if run.has_minimums else run.middle,
        scales=run.factors(_scales, "", is_turned=False),
        minimums=run.factors(_minimums, "", is_turned=False) if run.has_minimums else [],
    )


def _scales(rows: QuantizedRows) -> Factors:
    return rows.scale_factors


def _minimums(rows: QuantizedRows) -> Factors:
    assert rows.minimum_factors is not None
    return rows.minimum_factors
