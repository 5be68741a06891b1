"""Values inside a graph on text that the model writes itself, as calibration data.

Source: Liu et al. 2023 (LLM-QAT, arXiv 2305.17888), section 3.1: text sampled from the model represents its training
data; random tokens do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import FloatArray, IntArray
from outrider.export.certificate.feeds import GraphFeeds
from outrider.export.certificate.graph_runner import GraphRunner, open_graph
from outrider.export.checkpoint import ModelFacts

_NUM_ROWS, _NUM_TOKENS = 16, 128
_OBSERVED_FILE = "observed.onnx"


def write_text(path: Path, facts: ModelFacts, *, seed: int = 0) -> IntArray:
    """Return tokens [B, T] int64 sampled from a canonical graph at temperature 1, first tokens drawn evenly."""
    generator = np.random.default_rng(seed)
    num_tokens = min(_NUM_TOKENS, facts.max_position)
    # A token at a time: weights are widened once, not in every call.
    runner = GraphRunner(path, facts, batch=_NUM_ROWS, capacity=num_tokens, maps_weights=False)
    tokens = np.empty((_NUM_ROWS, num_tokens), np.int64)
    tokens[:, 0] = generator.integers(0, facts.vocab_size, _NUM_ROWS)
    for place in range(1, num_tokens):
        start = np.full(_NUM_ROWS, place - 1, np.int64)
        logits = runner.extend(tokens[:, place - 1 : place], start)[:, 0]
        tokens[:, place] = (logits + generator.gumbel(size=logits.shape)).argmax(-1)
    return tokens


def observe(
    path: Path, facts: ModelFacts, names: Sequence[str], tokens: IntArray
) -> dict[str, FloatArray]:
    """Return values [B * T, K] float32 of a canonical graph, by name, while it reads tokens [B, T] int64.

    A second graph lies beside ``path`` meanwhile, whose outputs the values [B, T, K] are.
    """
    model = ir.load(path)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name in names:
        values[name].type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(values[name])
    observed = path.with_name(_OBSERVED_FILE)
    try:
        ir.save(model, observed)
        session = open_graph(observed)
    finally:
        observed.unlink(missing_ok=True)
    batch, capacity = tokens.shape
    feeds = GraphFeeds(session, facts)
    span = feeds.span(tokens, np.zeros(batch, np.int64), capacity=capacity)
    found = session.run(list(names), {**span, **feeds.caches(batch, capacity)})
    return {name: held.reshape(-1, held.shape[-1]) for name, held in zip(names, found, strict=True)}
