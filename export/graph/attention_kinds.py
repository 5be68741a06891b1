"""The Attention nodes of a canonical graph by what they attend to.

    self     causal, over a cache that the graph writes: K and V come from TensorScatter
    source   over what was read of a source before: K and V are inputs of the graph
    encoder  over the sequence itself, in both directions: K and V are computed from it, in ``encode.onnx``

All see K and V up to their row's length (Attention's input ``nonpad_kv_seqlen``), and all may add a bias to the scores.
Where the model has sinks (``tracing.attention``) the scores are an output too, and the answers are multiplied by what
the sinks leave of them.
A node of another form has no kind: rewrites refuse it.

Source: ONNX operator Attention-24.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import onnx_ir as ir
from outrider.engines.base import BundleError
from outrider.export.graph.edits import source

# Inputs of Attention-24.
QUERIES, KEYS, VALUES, BIAS, LENGTHS = 0, 1, 2, 3, 6
# Between bias and lengths: the caches that it would concatenate.
_OWN_CACHES = (4, 5)
# Outputs of Attention-24.
ANSWERS, SCORES = 0, 3


class AttentionKind(Enum):
    """What an Attention node attends to."""

    SELF = "self"
    SOURCE = "source"
    ENCODER = "encoder"


def attention_nodes(graph: ir.Graph, kind: AttentionKind | None = None) -> list[ir.Node]:
    """Return the Attention nodes of a graph, of all kinds if none is named."""
    nodes = [node for node in graph if node.op_type == "Attention"]
    return nodes if kind is None else [node for node in nodes if attention_kind(node) is kind]


def count_kinds(graph: ir.Graph) -> Counter[AttentionKind | None]:
    """Return how many Attention nodes of each kind a graph has; None counts those of other forms."""
    return Counter(map(attention_kind, attention_nodes(graph)))


def check_attention(path: Path, wanted: Mapping[AttentionKind, int]) -> None:
    """Refuse a graph that has other Attention nodes than those wanted, by kind.

    Raises:
        BundleError: says which it has.
    """
    kinds = count_kinds(ir.load(path).graph)
    if kinds != Counter(wanted):  # no node of a kind is none wanted
        raise BundleError(
            f"{path.name}: Attention nodes {_listed(kinds)}, wanted {_listed(wanted)}; "
            "the model does not attend through the attention interface"
        )


def _listed(kinds: Mapping[AttentionKind, int] | Mapping[AttentionKind | None, int]) -> str:
    named = (f"{count} {kind.value if kind else 'other'}" for kind, count in kinds.items())
    return ", ".join(named) or "none"


def attention_kind(node: ir.Node) -> AttentionKind | None:
    """Return the kind of an Attention node, None for another form."""
    if input_of(node, LENGTHS) is None or any(input_of(node, index) for index in _OWN_CACHES):
        return None
    is_causal = node.attributes.get_int("is_causal", 0) == 1
    heads = [input_of(node, index) for index in (KEYS, VALUES)]
    if all(source(value, "TensorScatter") for value in heads):
        return AttentionKind.SELF if is_causal else None
    if is_causal:
        return None
    if all(value is not None and value.is_graph_input() for value in heads):
        return AttentionKind.SOURCE
    is_computed = not any(value is None or value.is_graph_input() for value in heads)
    return AttentionKind.ENCODER if is_computed else None


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node, None where it has none there."""
    return node.inputs[index] if index < len(node.inputs) else None


def gives_scores(node: ir.Node) -> bool:
    """Return whether an Attention node's scores are read: its answers stand beside sinks."""
    return len(node.outputs) > SCORES and bool(node.outputs[SCORES].uses())


def has_sinks(path: Path) -> bool:
    """Return whether any attention of the graph at ``path`` stands beside sinks."""
    return any(map(gives_scores, attention_nodes(ir.load(path).graph)))


def answers_of(node: ir.Node) -> ir.Value:
    """Return the answers [B, H, T, D] of an Attention node, behind its sinks where it has some."""
    answers = node.outputs[ANSWERS]
    if not gives_scores(node):
        return answers
    (use,) = answers.uses()
    return use.node.outputs[0]


def drop_unread_outputs(graph: ir.Graph) -> None:
    """Leave out the caches that Attention would copy before its scores, which the trace names and nothing reads."""
    for node in attention_nodes(graph):
        for value in node.outputs:
            if not value.uses():
                value.name = ""
