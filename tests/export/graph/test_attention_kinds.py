"""Attention nodes have a kind by their form, and other forms have none."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from outrider.engines.base import BundleError
from outrider.export.graph.attention_kinds import (
    AttentionKind,
    attention_kind,
    attention_nodes,
    check_attention,
)

SHAPE = ["b", 2, "s", 8]


def attention(keys: str, *, lengths: bool = True, is_causal: int = 0, past: str = "") -> ir.Node:
    """The Attention node of a graph with a cache that it writes, one that it reads, and heads of its own."""
    inputs = ["own", keys, keys, "", past, past, "lengths" if lengths else ""]
    nodes = [
        helper.make_node("TensorScatter", ["cache", "own", "lengths"], ["written"], axis=2),
        helper.make_node("Neg", ["own"], ["computed"]),
        helper.make_node("Attention", inputs, ["answers"], is_causal=is_causal),
    ]
    floats = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in ("own", "cache")
    ]
    lengths_info = helper.make_tensor_value_info("lengths", TensorProto.INT64, ["b"])
    answers = helper.make_tensor_value_info("answers", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", [*floats, lengths_info], [answers])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    (node,) = attention_nodes(ir.from_proto(model).graph)
    return node


@pytest.mark.parametrize(
    ("keys", "is_causal", "kind"),
    [
        ("written", 1, AttentionKind.SELF),
        ("cache", 0, AttentionKind.SOURCE),
        ("computed", 0, AttentionKind.ENCODER),
        ("written", 0, None),
        ("cache", 1, None),
        ("computed", 1, None),
    ],
)
def test_kind_is_told_by_keys_and_causality(
    keys: str, is_causal: int, kind: AttentionKind | None
) -> None:
    assert attention_kind(attention(keys, is_causal=is_causal)) is kind


@pytest.mark.parametrize("keys", ["written", "cache", "computed"])
def test_attention_without_lengths_or_with_caches_of_its_own_has_no_kind(keys: str) -> None:
    is_causal = int(keys == "written")
    assert attention_kind(attention(keys, is_causal=is_causal, lengths=False)) is None
    assert attention_kind(attention(keys, is_causal=is_causal, past="cache")) is None


def test_a_graph_with_other_attention_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tiny_bundle / "target" / "model.onnx"
    check_attention(path, {AttentionKind.SELF: 2})
    with pytest.raises(BundleError, match="Attention nodes 2 self, wanted 3 self"):
        check_attention(path, {AttentionKind.SELF: 3})
    model = onnx.load(path, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    del node.attribute[:]
    changed = tmp_path / "model.onnx"
    changed.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="1 other, 1 self, wanted 2 self"):
        check_attention(changed, {AttentionKind.SELF: 2})
