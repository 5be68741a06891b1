"""The twin of a 16-bit graph: a graph that rounds as it does, on a provider that computes in float32 alone.

ONNX Runtime's CPU provider has no products of bfloat16, and adds and drops casts of its own around those of
float16. The twin is derived from the graph that accelerators run, node by node and without knowing any operator:
an operator with 16-bit inputs reads them widened to float32, and its 16-bit outputs are rounded from float32, once. So
every value that has 16 bits on the device has the same 16 bits' worth here, inputs, weights and caches included.

It shows that the graph's 16-bit values lose no more than they may, and that none of them overflows. It does not
show in which order a device sums, nor what a device's fused kernel rounds inside an operator: FlashAttention
multiplies values by probabilities of 16 bits, here they have 32.

Requires the type of every 16-bit value in the graph. Ensures the inputs and outputs of the graph, over the same
data file.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import onnx_ir as ir

HALF_KINDS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def twin_of(
    path: Path, *, kinds: Set[ir.DataType] = HALF_KINDS, float32_caches: bool = False
) -> bytes | None:
    """Return the twin of the graph at ``path``, serialised; its weights are in the graph's folder.

    Args:
        path: of the graph.
        kinds: types that the twin computes in float32.
        float32_caches: give inputs and outputs of these types float32, rounded when they are read: NumPy has no
            bfloat16.

    Returns:
        None where no value of the graph has one of the types.
    """
    model = ir.load(path)
    twin = _Twin(model.graph, kinds)
    twin.run()
    if not twin.num_rounded:
        return None
    if float32_caches:
        twin.widen_interface()
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised


class _Twin:
    """Widens and rounds around every operator of a graph, in place."""

    def __init__(self, graph: ir.Graph, kinds: Set[ir.DataType]) -> None:
        self._graph = graph
        self._kinds = kinds
        self._widened: dict[ir.Value, ir.Value] = {}
        self.num_rounded = 0

    def run(self) -> None:
        """Rewrite the nodes."""
        for node in list(self._graph):
            # A cast widens or rounds by itself.
            if node.op_type == "Cast":
                continue
            for index, value in enumerate(node.inputs):
                if value is not None and value.dtype in self._kinds:
                    node.replace_input_with(index, self._widen(value, node))
            for value in node.outputs:
                if value.dtype in self._kinds:
                    self._round(value, node)

    def widen_interface(self) -> None:
        """Give inputs and outputs float32; inputs are rounded first."""
        for value in self._graph.inputs:
            if value.dtype in self._kinds:
                node = _cast(value, value.dtype, f"{value.name}.rounded")
                value.replace_all_uses_with(node.outputs[0])
                node.replace_input_with(0, value)
                value.type = ir.TensorType(ir.DataType.FLOAT)
                self._graph.insert_before(self._graph[0], node)
        for index, value in enumerate(self._graph.outputs):
            if value.dtype in self._kinds:
                node = _cast(value, ir.DataType.FLOAT, str(value.name))
                value.name = f"{value.name}.rounded"
                self._graph.append(node)
                self._graph.outputs[index] = node.outputs[0]

    def _widen(self, value: ir.Value, before: ir.Node) -> ir.Value:
        if value not in self._widened:
            node = _cast(value, ir.DataType.FLOAT, f"{value.name}.wide")
            # ONNX Runtime (1.31.1) orders nodes depth first from the outputs, later ones of the file first. Casts that
            # stand behind what they are multiplied with would all run first: every weight would be widened at once.
            self._graph.insert_before(self._graph[0] if value.is_initializer() else before, node)
            self._widened[value] = node.outputs[0]
        return self._widened[value]

    def _round(self, value: ir.Value, producer: ir.Node) -> None:
        assert value.dtype is not None
        node = _cast(value, value.dtype, str(value.name))
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        node.replace_input_with(0, value)
        value.name, value.type = f"{value.name}.exact", ir.TensorType(ir.DataType.FLOAT)
        self._graph.insert_after(producer, node)
        self.num_rounded += 1


def _cast(value: ir.Value, kind: ir.DataType | None, name: str) -> ir.Node:
    assert kind is not None
    node = ir.node("Cast", [value], attributes={"to": kind.value})
    made = node.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(kind), value.shape
    return node
