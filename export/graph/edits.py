"""Helpers for reading and editing a traced graph, shared by the rewrites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Axis = int | str | ir.SymbolicDim | None


def source(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes the value, if it is of this operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the array of a value that is constant, else None."""
    tensor = constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a value that is constant, unread, else None."""
    return None if value is None or value.is_graph_input() else value.const_value


def folded(value: ir.Value | None) -> npt.NDArray[Any]:
    """Return what a value is that is computed from constants alone, by Cast, Reshape, Unsqueeze, Mul and Add."""
    found = constant(value)
    if found is not None:
        return found
    node = None if value is None else value.producer()
    assert node is not None, "not computed from constants"
    given = [folded(one) for one in node.inputs]
    if node.op_type == "Cast":
        return given[0].astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if node.op_type == "Reshape":
        return given[0].reshape(given[1])
    if node.op_type == "Unsqueeze":
        return np.expand_dims(given[0], tuple(given[1].tolist()))
    computed: npt.NDArray[Any] = {"Mul": np.multiply, "Add": np.add}[node.op_type](*given)
    return computed


def commuted(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield both orders of a commutative operator's two inputs."""
    first, second = node.inputs
    assert first is not None and second is not None
    yield first, second
    yield second, first


def put(graph: ir.Graph, array: npt.NDArray[Any], name: str) -> ir.Value:
    """Add an initializer to the graph."""
    return put_tensor(graph, ir.tensor(np.ascontiguousarray(array), name=name))


def put_tensor(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer to the graph, named like the tensor."""
    value = ir.Value(
        name=tensor.name,
        const_value=tensor,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
    )
    graph.register_initializer(value)
    return value


def put_input(graph: ir.Graph, name: str, kind: ir.DataType, axes: Sequence[Axis]) -> ir.Value:
    """Add an input to the graph."""
    value = ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(kind))
    graph.inputs.append(value)
    return value


def replace(graph: ir.Graph, node: ir.Node, fused: ir.Node) -> None:
    """Replace ``node`` by ``fused``; both have one output."""
    graph.insert_before(node, fused)
    take_over(node.outputs[0], fused.outputs[0])


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace every use of ``old`` by ``new``, which takes its name, type and shape."""
    new.name, old.name = old.name, f"{old.name}.replaced"
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def insert_tape(
    graph: ir.Graph,
    tape: ir.tape.Tape,
    name: str,
    *,
    before: ir.Node | None = None,
    after: ir.Node | None = None,
) -> None:
    """Insert a tape's nodes before all others, or beside a node; outputs are called "name.0" and so on."""
    nodes = list(tape.nodes)
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{name}.{number}"
    if after is None:
        graph.insert_before(before or graph[0], nodes)
    else:
        graph.insert_after(after, nodes)


def drop_unused(graph: ir.Graph) -> None:
    """Remove nodes and initializers that nothing reads."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def gate_columns(graph: ir.Graph) -> int:
    """Return the columns of a projection that gates the delta rules of a graph, one per head; 0 without any."""
    scans = (node for node in graph if node.op_type == "LinearAttention" and len(node.inputs) > 5)
    return max((node.attributes["kv_num_heads"].as_int() for node in scans), default=0)
