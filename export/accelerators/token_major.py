"""Caches by token on accelerators: a token's keys of all heads lie side by side, as its products write them.

The canonical graph has heads first, [batch, heads, tokens, size], as the CPU reads them. Kernels of a GPU read
[batch, tokens, heads * size]: queries, answers and caches of that layout are never transposed, which is four launches
a layer. Where one product gives queries, keys and values, all of it is rotated in one launch, and values are
cut from what was not rotated.

Requires graphs whose Attention nodes all are of kind SELF. Ensures the same function, with caches
[batch, capacity, heads * size]; every value on the way has its type.

Source: ONNX operators Attention-24, RotaryEmbedding-23 and TensorScatter-24, which take both layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.engines.bundle.names import is_cache
from outrider.export.graph.attention_kinds import (
    ANSWERS,
    KEYS,
    QUERIES,
    VALUES,
    attention_nodes,
)
from outrider.export.graph.edits import put, source

# Of Transpose: exchanges heads and tokens of [batch, heads, tokens, size].
_EXCHANGE = {"perm": (0, 2, 1, 3)}
# Of Reshape: all heads side by side.
_FLAT = (-1,)
_NORMS = ("RMSNormalization", "LayerNormalization")
# Of Shape, first and last: what it reads of a cache with heads first.
_ROWS_AXIS, _CAPACITY_AXIS = (0, 1), (2, 3)
# Input of TensorScatter-24.
_UPDATE = 1


def lay_out_by_token(graph: ir.Graph, where: str) -> None:
    """Give caches, queries and answers of every Attention node the layout by token, in place.

    ``where`` names the graph in errors.

    Raises:
        BundleError: something else than attention reads a cache.
    """
    layout = _Layout(graph)
    for node in attention_nodes(graph):
        layout.rewrite(node)
    for value in graph.inputs:
        if is_cache(value.name or ""):
            _flatten(value)
            _read_capacity(value, where)


def _flatten(value: ir.Value) -> None:
    """Declare a cache's shape by token."""
    shape = value.shape
    assert shape is not None
    rows, heads, capacity, size = shape
    assert isinstance(heads, int) and isinstance(size, int)
    value.shape = ir.Shape([rows, capacity, heads * size])


def _read_capacity(cache: ir.Value, where: str) -> None:
    """Let who reads a cache's capacity find it one axis earlier.

    Raises:
        BundleError: another operator reads the cache.
    """
    for node in [use.node for use in cache.uses()]:
        axes = tuple(node.attributes.get_int(name, -1) for name in ("start", "end"))
        if node.op_type == "Shape" and axes == _CAPACITY_AXIS:
            node.attributes["start"] = ir.AttrInt64("start", 1)
            node.attributes["end"] = ir.AttrInt64("end", 2)
        elif node.op_type != "TensorScatter" and (node.op_type, axes) != ("Shape", _ROWS_AXIS):
            raise BundleError(f"{where}: {node.op_type} reads a cache, which has one layout")


class _Layout:
    """Rewrites the values around attention, each once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[ir.Value, ir.Value] = {}
        self._rotated: dict[tuple[ir.Value | None, ...], ir.Value] = {}
        self._parts: dict[tuple[ir.Value, int], ir.Value] = {}
        self._shapes: dict[tuple[int, ...], ir.Value] = {}
        self._count = 0

    def rewrite(self, node: ir.Node) -> None:
        """Let one Attention node read and answer by token."""
        queries, answers = node.inputs[QUERIES], node.outputs[ANSWERS]
        keys = source(node.inputs[KEYS], "TensorScatter")
        values = source(node.inputs[VALUES], "TensorScatter")
        assert queries is not None and keys is not None and values is not None
        heads, size = _heads(queries)
        flat = self._by_token(queries)
        counts = {"q_num_heads": heads, "kv_num_heads": self._scatter(keys)}
        self._scatter(values)
        given = {name: ir.AttrInt64(name, count) for name, count in counts.items()}
        inputs = [flat, *node.inputs[1:]]
        attended = self._put("Attention", inputs, node, answers, {**node.attributes, **given})
        by_head = self._reshape(attended, (heads, size), node, answers)
        turned = self._put("Transpose", [by_head], node, answers, _EXCHANGE)
        for use in list(answers.uses()):
            if _exchanges(use.node):
                use.node.outputs[0].replace_all_uses_with(by_head, replace_graph_outputs=True)
            else:
                use.node.replace_input_with(use.idx, turned)

    def _scatter(self, node: ir.Node) -> int:
        """Write a cache by token; return its heads."""
        update, written = node.inputs[_UPDATE], node.outputs[0]
        assert update is not None
        heads, _ = _heads(update)
        if written not in self._made:
            self._made[written] = written
            node.replace_input_with(_UPDATE, self._by_token(update))
            node.attributes["axis"] = ir.AttrInt64("axis", 1)
            _flatten(written)
        return heads

    def _by_token(self, value: ir.Value | None) -> ir.Value:
        """Return [batch, tokens, heads * size] of a value [batch, heads, tokens, size]."""
        assert value is not None
        if value not in self._made:
            self._made[value] = self._computed(value)
        return self._made[value]

    def _computed(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        assert node is not None
        given = node.inputs[0]
        if _exchanges(node):
            return self._reshape(given, _FLAT, node, value)
        if node.op_type == "Split" and node.attributes.get_int("axis", 0) == 1:
            return self._part(self._by_token(given), node, node.outputs.index(value))
        if node.op_type == "RotaryEmbedding":
            return self._rotate(node, _heads(value)[0])
        if node.op_type in _NORMS:
            read = self._reshape(self._by_token(given), _heads(value), node, value)
            inputs = [read, *node.inputs[1:]]
            normed = self._put(node.op_type, inputs, node, value, node.attributes)
            return self._reshape(normed, _FLAT, node, value)
        turned = self._put("Transpose", [value], node, value, _EXCHANGE, is_after=True)
        made = turned.producer()
        assert made is not None
        return self._reshape(turned, _FLAT, made, value, is_after=True)

    def _rotate(self, node: ir.Node, heads: int) -> ir.Value:
        """Rotate by token; all parts of one product at once where another of them is rotated alike."""
        given, *tables = node.inputs
        split = source(given, "Split")
        alike = [
            use.node
            for value in (split.outputs if split is not None else ())
            for use in value.uses()
            if use.node.op_type == "RotaryEmbedding" and use.node.inputs[1:] == node.inputs[1:]
            and _same(use.node, node)
        ]  # fmt: skip
        if split is None or len(alike) < 2:
            return self._rotated_whole(self._by_token(given), tables, heads, node)
        assert given is not None
        key = (split.inputs[0], *tables)
        if key not in self._rotated:
            all_heads = sum(_heads(value)[0] for value in split.outputs)
            whole = self._by_token(split.inputs[0])
            self._rotated[key] = self._rotated_whole(whole, tables, all_heads, node)
        return self._part(self._rotated[key], split, split.outputs.index(given), before=node)

    def _rotated_whole(
        self, whole: ir.Value, tables: Sequence[ir.Value | None], heads: int, node: ir.Node
    ) -> ir.Value:
        given = {"num_heads": ir.AttrInt64("num_heads", heads)}
        attributes = {**node.attributes, **given}
        return self._put("RotaryEmbedding", [whole, *tables], node, node.outputs[0], attributes)

    def _part(
        self, whole: ir.Value, split: ir.Node, index: int, *, before: ir.Node | None = None
    ) -> ir.Value:
        """Return a part of a value by token, as a Split cuts it by heads; all parts are cut at once."""
        if (whole, index) not in self._parts:
            sizes = np.array([heads * size for heads, size in map(_heads, split.outputs)], np.int64)
            cut = put(self._graph, sizes, f"{whole.name}.sizes")
            parts = ir.node("Split", [whole, cut], attributes={"axis": 2}, num_outputs=len(sizes))
            self._graph.insert_before(before or split, parts)
            for at, (part, old) in enumerate(zip(parts.outputs, split.outputs, strict=True)):
                part.name, part.type = f"{whole.name}.part.{at}", old.type
                self._parts[whole, at] = part
        return self._parts[whole, index]

    def _reshape(
        self, value: ir.Value | None, last: tuple[int, ...], beside: ir.Node, like: ir.Value, *,
        is_after: bool = False,
    ) -> ir.Value:  # fmt: skip
        """Return a value with other last axes behind rows and tokens."""
        if last not in self._shapes:
            shape = np.array([0, 0, *last], np.int64)
            self._shapes[last] = put(self._graph, shape, f"by_token.{'x'.join(map(str, last))}")
        inputs = [value, self._shapes[last]]
        return self._put("Reshape", inputs, beside, like, is_after=is_after)

    def _put(
        self, op_type: str, inputs: Sequence[ir.Value | None], beside: ir.Node, like: ir.Value,
        attributes: Mapping[str, Any] | None = None, *, is_after: bool = False,
    ) -> ir.Value:  # fmt: skip
        """Insert a node beside another; its output has the type of ``like``."""
        node = ir.node(op_type, inputs, attributes=attributes)
        (self._graph.insert_after if is_after else self._graph.insert_before)(beside, node)
        made = node.outputs[0]
        self._count += 1
        made.name, made.type = f"{like.name}.by_token.{self._count}", like.type
        return made


def _heads(value: ir.Value) -> tuple[int, int]:
    """Heads and size of one, of a value [batch, heads, tokens, size]."""
    assert value.shape is not None
    _, heads, _, size = value.shape
    assert isinstance(heads, int) and isinstance(size, int)
    return heads, size


def _exchanges(node: ir.Node) -> bool:
    """Return whether a node exchanges heads and tokens."""
    return (
        node.op_type == "Transpose" and (*node.attributes["perm"].as_ints(),) == _EXCHANGE["perm"]
    )


def _same(one: ir.Node, other: ir.Node) -> bool:
    """Return whether two nodes have the same attributes."""
    return {name: value.value for name, value in one.attributes.items()} == {
        name: value.value for name, value in other.attributes.items()
    }
