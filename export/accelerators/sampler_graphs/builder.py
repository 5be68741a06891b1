"""A builder of ONNX graphs by Python expressions: values have operators, numbers become constants.

It has only what the sampler's graphs need. ONNX Runtime and TensorRT's parser must know every operator; the
package's docstring lists those that they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 24
IR_VERSION = 11
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
INT32 = TensorProto.INT32
_COMPARISONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN"}


def _binary(kind: str) -> Callable[[Value, Value | float], Value]:
    def method(self: Value, other: Value | float) -> Value:
        return self.graph.op(kind, self, other)

    return method


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a graph under construction; numbers beside it become constants of its type."""

    graph: Graph
    name: str
    dtype: int

    __add__ = _binary("Add")
    __sub__ = _binary("Sub")
    __mul__ = _binary("Mul")
    __truediv__ = _binary("Div")
    # ONNX truncates, so both sides must not be negative.
    __floordiv__ = _binary("Div")
    __lt__ = _binary("Less")
    __le__ = _binary("LessOrEqual")
    __gt__ = _binary("Greater")
    __ge__ = _binary("GreaterOrEqual")
    __and__ = _binary("And")
    __or__ = _binary("Or")

    def __mod__(self, other: int) -> Value:
        return self - (self // other) * other

    def __invert__(self) -> Value:
        return self.graph.op("Not", self)

    def equals(self, other: Value | float) -> Value:
        """Return where both are equal, bool."""
        return self.graph.op("Equal", self, other)

    def cast(self, dtype: int) -> Value:
        """Return the same numbers in another type; fractions are cut."""
        return self.graph.op("Cast", self, dtype=dtype, to=dtype)

    def where(self, yes: Value | float, no: Value | float) -> Value:
        """Return ``yes`` where this is true, ``no`` elsewhere."""
        known = yes if isinstance(yes, Value) else no
        assert isinstance(known, Value)
        graph = self.graph
        pair = [
            graph.constant(v, known.dtype) if not isinstance(v, Value) else v for v in (yes, no)
        ]
        return graph.op("Where", self, *pair, dtype=known.dtype)

    def sum(self, axis: int = -1, *, keepdims: bool = True) -> Value:
        """Return the sum along one axis."""
        return self._reduce("ReduceSum", axis, keepdims)

    def max(self, axis: int = -1, *, keepdims: bool = True) -> Value:
        """Return the maximum along one axis."""
        return self._reduce("ReduceMax", axis, keepdims)

    def min(self, axis: int = -1, *, keepdims: bool = True) -> Value:
        """Return the minimum along one axis."""
        return self._reduce("ReduceMin", axis, keepdims)

    def argmax(self, length: int) -> Value:
        """Return the first index of the maximum along the last axis of this length, that axis kept.

        ONNX's ArgMax becomes a TopK layer in TensorRT, which does not say what it does with ties.
        """
        return self._first(self.equals(self.max()), length)

    def argmin(self, length: int) -> Value:
        """Return the first index of the minimum along the last axis of this length, that axis kept."""
        return self._first(self.equals(self.min()), length)

    def cumsum(self) -> Value:
        """Return the inclusive running sum along the last axis."""
        return self.graph.op("CumSum", self, self.graph.constant(-1, INT64))

    def unsqueeze(self, axis: int) -> Value:
        """Add an axis of length 1."""
        return self.graph.op("Unsqueeze", self, self.graph.constant([axis], INT64))

    def squeeze(self, axis: int) -> Value:
        """Remove an axis of length 1."""
        return self.graph.op("Squeeze", self, self.graph.constant([axis], INT64))

    def length(self, axis: int) -> Value:
        """Return the length of an axis, [1] int64."""
        return self.graph.op("Shape", self, start=axis, end=axis + 1)

    def slice(self, start: int, end: int, axis: int) -> Value:
        """Return elements start..end-1 along one axis."""
        constant = self.graph.constant
        bounds = [constant([bound], INT64) for bound in (start, end, axis)]
        return self.graph.op("Slice", self, *bounds)

    def head(self, count: Value, axis: int) -> Value:
        """Return the first ``count`` [1] int64 elements along one axis."""
        constant = self.graph.constant
        return self.graph.op("Slice", self, constant([0], INT64), count, constant([axis], INT64))

    def pick(self, indices: Value, axis: int = -1) -> Value:
        """Return elements at ``indices``, which has this value's rank, along one axis."""
        return self.graph.op("GatherElements", self, indices, axis=axis)

    def _first(self, is_wanted: Value, length: int) -> Value:
        """Return the first wanted index; the last of all where none is wanted, as in a row of NaN."""
        return is_wanted.where(self.graph.ids(length), length - 1).min()

    def _reduce(self, kind: str, axis: int, keepdims: bool) -> Value:
        axes = self.graph.constant([axis], INT64)
        return self.graph.op(kind, self, axes, keepdims=int(keepdims))


class Graph:
    """Collects nodes, constants, inputs and outputs; ``model`` closes it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[int, tuple[int, ...], bytes], Value] = {}
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._names: dict[str, str] = {}

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> Value:
        """Declare an input."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return Value(self, name, dtype)

    def output(self, name: str, value: Value, shape: Sequence[int | str]) -> None:
        """Declare a value as an output of this name.

        The node that makes it writes it there itself: a copy would break memory that is bound as
        input and output.
        """
        self._names[value.name] = name
        self._outputs.append(helper.make_tensor_value_info(name, value.dtype, shape))

    def constant(self, value: object, dtype: int) -> Value:
        """Return a constant; equal ones are stored once."""
        array: npt.NDArray[Any] = np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(dtype))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = Value(self, name, dtype)
        return self._constants[key]

    def op(
        self,
        kind: str,
        first: Value,
        *others: Value | float,
        dtype: int | None = None,
        **attrs: int,
    ) -> Value:
        """Add a node and return its output.

        Args:
            kind: operator.
            first: its first input.
            others: its other inputs; numbers become constants of the first input's type.
            dtype: of the output, where it is neither the operator's own nor the first input's.
            attrs: its attributes.
        """
        values = [
            other if isinstance(other, Value) else self.constant(other, first.dtype)
            for other in others
        ]
        name = f"{kind}_{len(self._nodes)}"
        names = [first.name, *(value.name for value in values)]
        node = helper.make_node(kind, names, [name], name=name)
        node.attribute.extend(helper.make_attribute(key, attrs[key]) for key in sorted(attrs))
        self._nodes.append(node)
        if dtype is None:
            dtype = BOOL if kind in _COMPARISONS else first.dtype
            dtype = INT64 if kind == "Shape" else dtype
        return Value(self, name, dtype)

    def ids(self, count: int | Value) -> Value:
        """Return [count] int64: 0, 1, 2, ...; ``count`` may be a scalar value [1]."""
        zero, one = self.constant(0, INT64), self.constant(1, INT64)
        end = count.squeeze(0) if isinstance(count, Value) else self.constant(count, INT64)
        return self.op("Range", zero, end, one)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Join values one after the other along an axis."""
        return self.op("Concat", *values, axis=axis)

    def full(self, shape: Sequence[Value], value: float, dtype: int) -> Value:
        """Return a tensor of one number; ``shape`` holds [1] int64 lengths."""
        return self.op("Expand", self.constant(value, dtype), self.concat(shape, 0))

    def model(self) -> onnx.ModelProto:
        """Return the checked model.

        Raises:
            onnx.checker.ValidationError: the graph is not standard ONNX; a bug.
        """
        for node in self._nodes:
            node.input[:] = [self._names.get(name, name) for name in node.input]
            node.output[:] = [self._names.get(name, name) for name in node.output]
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, self._initializers
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="outrider"
        )
        onnx.checker.check_model(model, full_check=True)
        return model
