"""A draft's graphs in its target's ids: what is fed is looked up in one table, and logits in another.

Nothing else changes, so the model within answers as it did. A target's id without a twin has the logit ``NEVER``, which
no other logit is beside, so it is drawn with probability 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.bundle import names
from outrider.export.graph.edits import put
from outrider.export.tokenizers.twins import TokenMaps

NEVER = -1e30


def map_ids(folder: Path, maps: TokenMaps) -> None:
    """Rewrite all graphs of a draft's folder; their weights stay where they are."""
    for path in sorted(folder.glob("*.onnx")):
        model = ir.load(path)
        inputs = {value.name: value for value in model.graph.inputs}
        outputs = {value.name: value for value in model.graph.outputs}
        if names.TOKENS in inputs and names.LOGITS in outputs:
            _map_input(model.graph, inputs[names.TOKENS], maps)
            _map_output(model.graph, outputs[names.LOGITS], maps)
            ir.save(model, path)


def _map_input(graph: ir.Graph, tokens: ir.Value, maps: TokenMaps) -> None:
    table = put(graph, maps.draft_ids, "draft_ids")
    node = ir.node("Gather", [table, tokens])
    own = node.outputs[0]
    own.name, own.type, own.shape = "draft_tokens", tokens.type, tokens.shape
    tokens.replace_all_uses_with(own)
    node.replace_input_with(1, tokens)
    graph.insert_before(graph[0], node)


def _map_output(graph: ir.Graph, logits: ir.Value, maps: TokenMaps) -> None:
    num_ids, size = len(maps.target_ids), len(maps.draft_ids)
    # Of each target id the draft's; V_draft, a column of NEVER, for those without.
    places = np.full(size, num_ids, np.int64)
    twins = np.flatnonzero(maps.target_ids >= 0)
    places[maps.target_ids[twins]] = twins
    assert logits.shape is not None and logits.type is not None
    pads = put(graph, np.array([0, 0, 0, 0, 0, 1], np.int64), "never.pads")
    # Logits are float32 in graphs of every precision.
    never = put(graph, np.array(NEVER, np.float32), "never")
    padded = ir.node("Pad", [logits, pads, never])
    mapped = ir.node("Gather", [padded.outputs[0], put(graph, places, "places")], {"axis": -1})
    padded.outputs[0].name = "draft_logits.padded"
    out = mapped.outputs[0]
    out.type, out.shape = logits.type, ir.Shape([*logits.shape[:-1], size])
    graph.extend([padded, mapped])
    graph.outputs[[one.name for one in graph.outputs].index(names.LOGITS)] = out
    logits.name, out.name = "draft_logits", names.LOGITS
