"""Tokens looked up among rows of integers, in standard ONNX: an embedding in the weights' blocks.

Requires a Gather of rows of a matrix [V, K] by tokens, with their shape. Ensures that rows of integers are gathered,
widened and multiplied with their scales, instead of rows of float32; the values are those of the blocks. Where head and
embedding are one matrix, columns of the head's blocks [K, V] are gathered: it is then stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.engines.base import FloatArray
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import SOURCE
from outrider.engines.onnx.session import open_session
from outrider.export.graph.edits import put, put_tensor, take_over
from outrider.export.weights.widened import canonical_graphs

# How the name of a lookup's last node ends.
_LOOKUP = ".lookup"
# Of ONNX's files, of the release that opset 24 came with.
_IR_VERSION = 11
_NIBBLE = 16.0
_MOVING = ("Gather", "Transpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows [V, K] of blocks along K, read when they are written.

    Attributes:
        shape: V and K.
        bits: of an integer, 4 or 8.
        integers: returns them, [V, K] uint8.
        middle: is subtracted from the integers; 0 where minimums are added.
        scales: multiply: numbers [V, blocks] of one type, or several that are multiplied, later ones [V, blocks / n].
        minimums: are added, likewise; empty where there are none.
    """

    shape: tuple[int, int]
    bits: int
    integers: Callable[[], npt.NDArray[np.uint8]]
    middle: int
    scales: Sequence[ir.TensorProtocol]
    minimums: Sequence[ir.TensorProtocol] = ()


def token_lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that look tokens up in a table."""
    return [
        node
        for node in graph
        if node.op_type == "Gather"
        and node.attributes.get_int("axis", 0) == 0
        and node.inputs[1] is not None
        and node.inputs[1].name in (names.TOKENS, SOURCE)
    ]


def integer_lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return the last nodes of lookups among integers."""
    return [node for node in graph if (node.name or "").endswith(_LOOKUP)]


def rows_of(graph: ir.Graph, last: ir.Node) -> FloatArray:
    """Return what a lookup among integers, given by its last node, answers for every token, [V, K]."""
    tokens = next(value for value in graph.inputs if value.name in (names.TOKENS, SOURCE))
    part = ir.convenience.extract(graph, [tokens], [last.outputs[0]])
    gather = next(node for node in part if node.op_type == "Gather")
    assert gather.inputs[0] is not None and isinstance(gather.inputs[0].shape, ir.Shape)
    num_rows = gather.inputs[0].shape.numpy()[gather.attributes.get_int("axis", 0)]
    session = open_session(ir.to_proto(ir.Model(part, ir_version=_IR_VERSION)).SerializeToString())
    (rows,) = session.run(None, {tokens.name: np.arange(num_rows)[None]})
    found: FloatArray = rows[0]
    return found


def look_up_rows(graph: ir.Graph, node: ir.Node, rows: TableRows, name: str) -> None:
    """Replace a lookup by one among rows of integers, whose constants begin with ``name``."""
    lookup = _Lookup(graph, node, name, rows.shape[1])
    scales = lookup.rows(rows.scales, "scale")
    minimums = lookup.rows(rows.minimums, "minimum") if rows.minimums else None
    lookup.finish(lookup.integers(rows), scales, minimums)


def look_up_columns(graph: ir.Graph, node: ir.Node, head: Sequence[ir.Value], name: str) -> None:
    """Replace a lookup by one among the columns of a head's blocks: integers [K, V] int8, and scales [K / block, V]."""
    integers, *scales = head
    assert integers.shape is not None
    lookup = _Lookup(graph, node, name, integers.shape.numpy()[0])
    found = lookup.tape.float32(lookup.columns(integers))
    parts = [lookup.columns(one) for one in scales]
    lookup.finish(found, lookup.tape.multiplied(parts, axis=-1), None)


def part_shared_blocks(path: Path) -> None:
    """Give products of blocks that a lookup reads too constants of their own, in the canonical graphs at ``path``.

    They are the same bytes of the same file under another name. Of blocks with two readers ONNX Runtime (1.32.0) does
    not make its operator: on the CPU it restores all of a head as float32 in every call, and its CUDA provider has no
    ``DequantizeLinear`` of 8 bits.
    """
    for one in canonical_graphs(path):
        model, is_changed = ir.load(one), False
        for node in model.graph:
            for place, value in enumerate(
                node.inputs if node.op_type == "DequantizeLinear" else ()
            ):
                tensor = None if value is None or len(value.uses()) < 2 else value.const_value
                if isinstance(tensor, ir.ExternalTensor):
                    copied = copy(tensor)
                    copied.name = f"{tensor.name}.of.{node.outputs[0].name}"
                    node.replace_input_with(place, put_tensor(model.graph, copied))
                    is_changed = True
        if is_changed:
            ir.save(model, one)


class _Lookup:
    """Nodes in front of a lookup that is to be replaced; ``width`` is K."""

    def __init__(self, graph: ir.Graph, node: ir.Node, name: str, width: int) -> None:
        ids = node.inputs[1]
        assert ids is not None and ids.shape is not None
        self._graph, self._node, self._ids, self._width = graph, node, ids, width
        self._axes = list(ids.shape)
        self.tape = Tape(graph, node, name)

    def finish(self, value: ir.Value, scales: ir.Value, minimums: ir.Value | None) -> None:
        """Scale integers [..., K] float32 by their blocks', and let the result be the lookup's."""
        tape, count = self.tape, _last(scales)
        value = self._reshaped(value, count, self._width // count)
        for op_type, part in (("Mul", scales), ("Add", minimums)):
            if part is not None:
                shape = ir.Shape([*self._axes, count, 1])
                spread = tape.add("Unsqueeze", [part, tape.number([-1])], shape)
                value = tape.add(op_type, [value, spread], value.shape)
        made = self._reshaped(value, self._width)
        producer = made.producer()
        assert producer is not None
        producer.name = f"{tape.name}{_LOOKUP}"
        take_over(self._node.outputs[0], made)
        self._graph.remove(self._node, safe=True)

    def integers(self, rows: TableRows) -> ir.Value:
        """Return integers [..., K] float32; of 4 bits a byte holds one of the first half of K and one of the last."""
        tape, width = self.tape, self._width
        if rows.bits == 4:
            pairs = tape.float32(self._rows(_bytes(rows, width // 2, f"{tape.name}.q")))
            shifted = tape.add("Mul", [pairs, tape.number(1 / _NIBBLE)], pairs.shape)
            high = tape.add("Floor", [shifted], pairs.shape)
            raised = tape.add("Mul", [high, tape.number(_NIBBLE)], pairs.shape)
            low = tape.add("Sub", [pairs, raised], pairs.shape)
            whole = ir.Shape([*self._axes, width])
            found = tape.add("Concat", [low, high], whole, {"axis": -1})
        else:
            found = tape.float32(self._rows(_bytes(rows, width, f"{tape.name}.q")))
        if not rows.middle:
            return found
        return tape.add("Sub", [found, tape.number(float(rows.middle))], found.shape)

    def rows(self, tensors: Sequence[ir.TensorProtocol], part: str) -> ir.Value:
        """Return gathered scales or minimums [..., K / block] float32."""
        for number, tensor in enumerate(tensors):
            tensor.name = f"{self.tape.name}.{part}.{number}"
        return self.tape.multiplied([self._rows(tensor) for tensor in tensors], axis=-1)

    def columns(self, stored: ir.Value) -> ir.Value:
        """Return what a constant [L, V] holds of the tokens, [..., L]."""
        assert stored.shape is not None
        length, rank = stored.shape[0], len(self._axes)
        shape = ir.Shape([length, *self._axes])
        found = self.tape.add("Gather", [stored, self._ids], shape, {"axis": 1})
        turn = {"perm": [*range(1, rank + 1), 0]}
        return self.tape.add("Transpose", [found], ir.Shape([*self._axes, length]), turn)

    def _rows(self, tensor: ir.TensorProtocol) -> ir.Value:
        stored = put_tensor(self._graph, tensor)
        shape = ir.Shape([*self._axes, tensor.shape.numpy()[1]])
        return self.tape.add("Gather", [stored, self._ids], shape)

    def _reshaped(self, value: ir.Value, *sizes: int) -> ir.Value:
        target = self.tape.number([*([0] * len(self._axes)), *sizes])
        return self.tape.add("Reshape", [value, target], ir.Shape([*self._axes, *sizes]))


def _last(value: ir.Value) -> int:
    assert value.shape is not None
    last = value.shape[-1]
    assert isinstance(last, int)
    return last


def _bytes(rows: TableRows, width: int, name: str) -> ir.TensorProtocol:
    def made() -> ir.TensorProtocol:
        integers = rows.integers()
        if rows.bits == 4:
            first, last = np.split(integers, 2, axis=1)
            integers = first | (last << np.uint8(4))
        return ir.tensor(np.ascontiguousarray(integers), name=name)

    shape = ir.Shape([rows.shape[0], width])
    return ir.LazyTensor(made, ir.DataType.UINT8, shape, name=name)


class Tape:
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
        """Return a value as float32."""
        if value.dtype is ir.DataType.FLOAT:
            return value
        return self.add("Cast", [value], value.shape, {"to": ir.DataType.FLOAT.value})

    def multiplied(self, factors: Sequence[ir.Value], axis: int) -> ir.Value:
        """Return float32 numbers, of which several together have one number of each later factor along the axis.

        The axis is 0, or -1 behind axes whose sizes are not known.
        """
        found, *others = map(self.float32, factors)
        for other in others:
            assert found.shape is not None and other.shape is not None
            sizes, count = list(found.shape), other.shape[axis]
            place = len(sizes) - 1 if axis else 0
            kept: list[int] = [0] * place
            many = sizes[place]
            assert isinstance(many, int) and isinstance(count, int)
            pair, after = [count, many // count], sizes[place + 1 :]
            split = ir.Shape([*sizes[:place], *pair, *after])
            grouped = self.add(
                "Reshape", [found, self.number([*kept, *pair, *[-1] * len(after)])], split
            )
            spread = ir.Shape([*sizes[:place], count, 1, *after])
            raised = self.add("Unsqueeze", [other, self.number([place + 1])], spread)
            product = self.add("Mul", [grouped, raised], split)
            target = self.number([*kept, many, *[-1] * len(after)])
            found = self.add("Reshape", [product, target], ir.Shape(sizes))
        return found

    def number(self, value: float | Sequence[int]) -> ir.Value:
        """Return a constant: float32, or int64 of one axis."""
        kind: Any = np.float32 if isinstance(value, float) else np.int64
        return put(self.graph, np.array(value, kind), self._next())

    def _next(self) -> str:
        self._count += 1
        return f"{self.name}.step_{self._count}"
