"""Weights, caches and matrix products in 16 bits; what lies between products too, or in float32.

Kernels sum in float32 inside an operator either way: a norm's mean of squares, a product, a softmax.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.engines.bundle.encoder_decoder import SOURCE, is_source_cache
from outrider.engines.bundle.names import is_cache
from outrider.export.graph.edits import constant, folded, put_tensor

# Operators that move values without computing: their result keeps the 16 bits.
_MOVING = frozenset({"Transpose", "Reshape", "Gather", "DequantizeLinear", "Identity"})
# Operators between products, of the residual, that compute in 16 bits where their input has them.
_BETWEEN = frozenset(
    {"Add", "Sub", "Mul", "Div", "Sigmoid", "Tanh", "Gelu", "Relu", "RMSNormalization", "LayerNormalization",
     "RotaryEmbedding", "Split", "Slice", "Concat", "GatherND", "Unsqueeze", "Squeeze", "Expand"}
)  # fmt: skip
# How many leading inputs of an operator are to be of the 16-bit type; of Attention, a bias of the scores too.
_COMPUTING = {"MatMul": 2, "Gemm": 3, "MatMulNBits": 1, "Attention": 4, "TensorScatter": 2}


class HalfPass:
    """Gives weights, caches and matrix products a 16-bit type; casts where it meets float32.

    ``kind`` is FLOAT16 or BFLOAT16; ``where`` names the graph in errors. Without ``with_embeddings`` tokens are
    looked up as they are stored. With ``with_residual`` the residual, norms and rotations have 16 bits too, and what
    is behind the last product stays float32.
    """

    def __init__(
        self, graph: ir.Graph, kind: ir.DataType, where: str, *, with_embeddings: bool = True,
        with_residual: bool = False,
    ) -> None:  # fmt: skip
        self._graph = graph
        self._kind = kind
        self._where = where
        self._with_embeddings = with_embeddings
        self._keeping = _MOVING | _BETWEEN if with_residual else _MOVING
        self._casts: dict[tuple[int, ir.DataType], ir.Value] = {}
        self._copies: dict[str | None, ir.Value] = {}

    def run(self) -> list[ir.Value]:
        """Rewrite the graph; return the weights that got another type, each computed anew whenever it is read.

        Raises:
            BundleError: a weight is beyond float16.
        """
        for value in (*self._graph.inputs, *self._graph.outputs):
            if is_cache(value.name or "") or is_source_cache(value.name or ""):
                value.type = ir.TensorType(self._kind)
        weights = self._weights()
        for weight in weights:
            self._narrow(weight)
        self._narrow_computed_scales()
        behind = self._behind_products()
        for node in list(self._graph):
            # That of an encoder may read what was split, in float32.
            is_attention = node.op_type == "Attention"
            if is_attention or (node.op_type in _COMPUTING and self._has_half(node)):
                self._cast_inputs(node, _COMPUTING[node.op_type], self._kind)
            elif node.op_type in self._keeping and self._has_half(node) and node not in behind:
                if node.op_type in _BETWEEN:
                    self._cast_inputs(node, len(node.inputs), self._kind)
            else:
                self._cast_inputs(node, len(node.inputs), ir.DataType.FLOAT)
                continue
            for value in node.outputs:
                value.type = ir.TensorType(self._kind)
        self._widen_logits()
        return [*weights, *self._copies.values()]

    def _behind_products(self) -> set[ir.Node]:
        """Return the nodes between the last product and the logits."""
        found: set[ir.Node] = set()
        values = [value for value in self._graph.outputs if value.name == names.LOGITS]
        while values:
            node = values.pop().producer()
            if node is not None and node.op_type not in _COMPUTING and node not in found:
                found.add(node)
                values += [value for value in node.inputs if value is not None]
        return found

    def _weights(self) -> list[ir.Value]:
        """Return initializers behind a matrix product, and the embedding of the tokens."""
        found: dict[str | None, ir.Value] = {}
        for node in self._graph:
            if node.op_type in ("MatMul", "Gemm"):
                roots = [_root(value) for value in node.inputs[:2]]
            elif self._is_lookup(node):
                roots = [_root(node.inputs[0])]
            else:
                continue
            found.update({root.name: root for root in roots if root is not None})
        return list(found.values())

    def _is_lookup(self, node: ir.Node) -> bool:
        return self._with_embeddings and node.op_type == "Gather" and _is_tokens(node.inputs[1])

    def _narrow(self, weight: ir.Value) -> None:
        wide, kind = weight.const_value, self._kind
        assert wide is not None
        is_float16 = kind is ir.DataType.FLOAT16
        if is_float16 and np.abs(wide.numpy()).max() > np.finfo(np.float16).max:
            raise BundleError(
                f"{self._where}: {weight.name} is beyond the range of float16; use bfloat16"
            )

        def narrowed() -> ir.TensorProtocol:
            return ir.tensor(wide.numpy().astype(kind.numpy()), dtype=kind, name=weight.name)

        shape = ir.Shape(wide.shape.numpy())
        weight.const_value = ir.LazyTensor(narrowed, kind, shape, name=weight.name)
        weight.type = ir.TensorType(kind)

    def _narrow_computed_scales(self) -> None:
        """Cast the scales of blocks that are computed from constants; that is folded when the graph is loaded."""
        for node in list(self._graph):
            if node.op_type != "DequantizeLinear" or node.attributes.get_int("block_size", 0) == 0:
                continue
            scale = node.inputs[1]
            if scale is not None and not scale.is_initializer():
                node.replace_input_with(1, self._cast(scale, self._kind, node))

    def _has_half(self, node: ir.Node) -> bool:
        return any(value is not None and value.dtype is self._kind for value in node.inputs)

    def _cast_inputs(self, node: ir.Node, count: int, kind: ir.DataType) -> None:
        floats = (ir.DataType.FLOAT, self._kind)
        for index, value in enumerate(node.inputs[:count]):
            if value is not None and value.dtype in floats and value.dtype is not kind:
                node.replace_input_with(index, self._cast(value, kind, node))

    def _cast(self, value: ir.Value, kind: ir.DataType, before: ir.Node) -> ir.Value:
        if kind is self._kind and constant(value) is not None:
            return self._copy(value)
        key = (id(value), kind)
        if key not in self._casts:
            node = ir.node("Cast", [value], attributes={"to": kind.value})
            node.outputs[0].name = f"{value.name}.{kind.name.lower()}"
            node.outputs[0].type = ir.TensorType(kind)
            node.outputs[0].shape = value.shape
            self._graph.insert_before(before, node)
            self._casts[key] = node.outputs[0]
        return self._casts[key]

    def _copy(self, value: ir.Value) -> ir.Value:
        """Return a constant's copy of 16 bits: a norm's weight is not cast in every call."""
        if value.name not in self._copies:
            array = folded(value).astype(self._kind.numpy())
            name = f"{value.name}.{self._kind.name.lower()}"
            tensor = ir.tensor(array, dtype=self._kind, name=name)
            self._copies[value.name] = put_tensor(self._graph, tensor)
        return self._copies[value.name]

    def _widen_logits(self) -> None:
        """Cast the logits, if there are any, to float32."""
        index, old = next(
            (
                (index, value)
                for index, value in enumerate(self._graph.outputs)
                if value.name == names.LOGITS
            ),
            (0, None),
        )
        if old is None or old.dtype is not self._kind:
            return
        old.name = f"{names.LOGITS}.half"
        node = ir.node("Cast", [old], attributes={"to": ir.DataType.FLOAT.value})
        logits = node.outputs[0]
        logits.name, logits.shape = names.LOGITS, old.shape
        logits.type = ir.TensorType(ir.DataType.FLOAT)
        self._graph.append(node)
        self._graph.outputs[index] = logits


def _root(value: ir.Value | None) -> ir.Value | None:
    """Return the constant float32 matrix that a value moves or dequantises, if any."""
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.op_type not in ("Transpose", "DequantizeLinear"):
            return None
        # Of quantised weights the scales carry the type.
        value = producer.inputs[1 if producer.op_type == "DequantizeLinear" else 0]
    if value is None or value.const_value is None or value.dtype is not ir.DataType.FLOAT:
        return None
    return value if len(value.const_value.shape) == 2 else None


def _is_tokens(value: ir.Value | None) -> bool:
    return value is not None and value.name in (names.TOKENS, SOURCE)
