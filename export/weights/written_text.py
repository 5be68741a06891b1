"""Values inside a graph on text that the model writes itself, as calibration data.

A model with an encoder writes to sources that it wrote before, so its encoder is observed on text too.

Source: Liu et al. 2023 (LLM-QAT, arXiv 2305.17888), section 3.1: text sampled from the model represents its training
data; random tokens do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE
from outrider.engines.bundle.names import MODEL_FILE
from outrider.export.certificate.feeds import Feeds, GraphFeeds, Sources
from outrider.export.certificate.graph_runner import GraphRunner, open_graph
from outrider.export.graph.edits import put
from outrider.export.model_config import EncoderConfig, ModelConfig

NUM_ROWS, NUM_TOKENS = 16, 128
_OBSERVED_FILE = "observed.onnx"


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Text of a model, and what it is an answer to.

    Attributes:
        tokens: [B, T] int64.
        sources: of the rows; None for a decoder-only model.
    """

    tokens: IntArray
    sources: Sources | None = None


def write_text(path: Path, model_config: ModelConfig, *, seed: int = 0) -> WrittenText:
    """Return text sampled from a canonical graph at temperature 1, its first tokens drawn evenly.

    A model with an encoder begins each answer as it does, and is asked twice: first about random tokens, then about
    its answers to them.
    """
    generator = np.random.default_rng(seed)
    if model_config.source is None:
        return WrittenText(_answers(path, model_config, None, generator))
    shape = (NUM_ROWS, NUM_TOKENS)
    drawn = generator.integers(0, model_config.source.vocab_size, shape, dtype=np.int64)
    first = _answers(path, model_config, _as_sources(drawn, model_config.source), generator)
    sources = _as_sources(first, model_config.source)
    return WrittenText(_answers(path, model_config, sources, generator), sources)


def answers_to(
    path: Path, model_config: ModelConfig, rows: IntArray, *, seed: int = 0
) -> WrittenText:
    """Return what a model with an encoder writes to rows [B, T] int64 of source tokens."""
    assert model_config.source is not None
    sources = _as_sources(rows, model_config.source)
    return WrittenText(_answers(path, model_config, sources, np.random.default_rng(seed)), sources)


def _answers(
    path: Path, model_config: ModelConfig, sources: Sources | None, generator: np.random.Generator
) -> IntArray:
    """Return tokens [B, T] int64 sampled a row per source, if there are any."""
    num_tokens = min(NUM_TOKENS, model_config.max_position)
    # A token at a time: weights are widened once, not in every call.
    runner = GraphRunner(
        path,
        model_config,
        batch=NUM_ROWS,
        capacity=num_tokens,
        source_capacity=NUM_TOKENS,
        maps_weights=False,
    )
    runner.read(sources)
    tokens = np.empty((NUM_ROWS, num_tokens), np.int64)
    tokens[:, 0] = generator.integers(0, model_config.vocab_size, NUM_ROWS)
    if model_config.decoder_start_token_id is not None:
        tokens[:, 0] = model_config.decoder_start_token_id
    for place in range(1, num_tokens):
        start = np.full(NUM_ROWS, place - 1, np.int64)
        logits = runner.extend(tokens[:, place - 1 : place], start)[:, 0]
        tokens[:, place] = (logits + generator.gumbel(size=logits.shape)).argmax(-1)
    return tokens


def _as_sources(tokens: IntArray, model_config: EncoderConfig) -> Sources:
    """Return texts [B, T] int64 as sources; of another vocabulary, ids that the encoder has too."""
    kept = tokens[:, : model_config.max_source] % model_config.vocab_size
    return Sources(tokens=kept, lengths=np.full(len(kept), kept.shape[1], np.int64))


def observe(
    path: Path, model_config: ModelConfig, names: Sequence[str], text: WrittenText
) -> dict[str, FloatArray]:
    """Return values [B * T, K] float32 of a canonical graph, by name, while it reads a text or its sources."""
    model = ir.load(path)
    values = _values_of(model.graph)
    for name in names:
        values[name].type = ir.TensorType(ir.DataType.FLOAT)
    found = _outputs(path, model, model_config, [values[name] for name in names], text)
    return {name: held.reshape(-1, held.shape[-1]) for name, held in zip(names, found, strict=True)}


def observe_moments(
    path: Path,
    model_config: ModelConfig,
    panels: Mapping[str, tuple[int, int]],
    text: WrittenText,
) -> dict[str, FloatArray]:
    """Return second moments [K / P, P, P] float32 of values [..., K] of a canonical graph, over all tokens of a text.

    ``panels`` are K / P and P by name. Tokens weigh alike, whatever their lengths: the first token's values are
    hundreds of times as long as others in many models, and would decide alone. The graph sums them up itself: no
    value is kept.
    """
    model = ir.load(path)
    values, tape = _values_of(model.graph), ir.tape.Tape()
    for name, (count, size) in panels.items():
        shape = put(model.graph, np.array([-1, count, size], np.int64), f"{name}.panels")
        even = tape.op("LpNormalization", [values[name]])
        rows = tape.op("Reshape", [even, shape])
        sides = (tape.op("Transpose", [rows], {"perm": perm}) for perm in ([1, 2, 0], [1, 0, 2]))
        tape.op("MatMul", [*sides])
    made = [node.outputs[0] for node in tape.nodes if node.op_type == "MatMul"]
    for number, node in enumerate(tape.nodes):
        node.outputs[0].name, node.outputs[0].type = (
            f"moments.{number}",
            ir.TensorType(ir.DataType.FLOAT),
        )
    model.graph.extend(tape.nodes)
    return dict(zip(panels, _outputs(path, model, model_config, made, text), strict=True))


def _values_of(graph: ir.Graph) -> dict[str | None, ir.Value]:
    return {value.name: value for node in graph for value in node.outputs}


def _outputs(
    path: Path,
    model: ir.Model,
    model_config: ModelConfig,
    values: Sequence[ir.Value],
    text: WrittenText,
) -> list[FloatArray]:
    """Return values of a graph made of that at ``path``, beside which it lies meanwhile."""
    if not values:  # a session would answer with all its outputs
        return []
    model.graph.outputs.extend(values)
    observed = path.with_name(_OBSERVED_FILE)
    try:
        ir.save(model, observed)
        session = open_graph(observed)
    finally:
        observed.unlink(missing_ok=True)
    given = _feeds_of(path, model_config, GraphFeeds(session, model_config), text)
    found: list[FloatArray] = session.run([value.name for value in values], given)
    return found


def _feeds_of(path: Path, model_config: ModelConfig, feeds: GraphFeeds, text: WrittenText) -> Feeds:
    """Return the inputs of the graph at ``path`` in which it reads a whole text, or its sources."""
    batch, capacity = text.tokens.shape
    if path.name == ENCODE_FILE:
        assert text.sources is not None
        caches = feeds.source_caches(batch, text.sources.tokens.shape[1])
        return {**text.sources.feeds(), **caches}
    span = feeds.span(text.tokens, np.zeros(batch, np.int64), capacity=capacity)
    given = {**span, **feeds.caches(batch, capacity)}
    if text.sources is None:
        return given
    runner = GraphRunner(
        path.with_name(MODEL_FILE),
        model_config,
        batch=batch,
        capacity=1,
        source_capacity=text.sources.tokens.shape[1],
    )
    runner.read(text.sources)
    return {**given, **runner.attended}
