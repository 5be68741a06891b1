"""The graph that draws one draft token per row and keeps the probabilities that it was drawn from.

It reads column 0 of the draft model's logits. Ids beyond the target's vocabulary are never proposed; ids that the
draft lacks have no mass. The token is an output [B, 1], the draft model's next input, and is written to
``draft_tokens`` for the next proposal and the judgement, so no value passes through the host between them.
"""

from __future__ import annotations

import onnx
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import Count, Rule, Variant
from outrider.export.accelerators.sampler_graphs.adjust import (
    Rows,
    adjusted,
    declare_rows,
    finite_rows,
)
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Graph, Value
from outrider.export.accelerators.sampler_graphs.draw import draw, race_winner


def propose_graph(
    variant: Variant, *, vocab_size: int, draft_vocab_size: int, depth: int
) -> onnx.ModelProto:
    """Return the graph of one variant that keeps ``depth`` rows.

    The depth is fixed: TensorRT updates no cache of unknown length.
    """
    graph = Graph(f"propose_{variant}")
    shape: list[int | str] = ["batch", "wanted", draft_vocab_size]
    given = graph.input(names.LOGITS, FLOAT, shape).slice(0, 1, 1)
    logits = _fitted(given, vocab_size, draft_vocab_size)
    rows = declare_rows(graph, variant)
    if variant.has_rows:
        token = _sampled(graph, logits, rows, (depth, vocab_size), variant)
    else:
        token = finite_rows(logits, None).where(logits.argmax(vocab_size), 0)
    token = token.squeeze(2)
    is_here = graph.ids(rows.draft_tokens.length(1)).equals(rows.count(Count.DEPTH).squeeze(2))
    graph.output(names.NEXT_TOKENS, token, ["batch", 1])
    new_tokens = is_here.where(token, rows.draft_tokens)
    graph.output(names.NEW_DRAFT_TOKENS, new_tokens, ["batch", "positions"])
    return graph.model()


def _fitted(logits: Value, vocab_size: int, draft_vocab_size: int) -> Value:
    """Return the logits over the target's vocabulary."""
    if draft_vocab_size >= vocab_size:
        return logits.slice(0, vocab_size, 2)
    constant = logits.graph.constant
    missing = constant([vocab_size - draft_vocab_size], INT64)
    lengths = [logits.length(0), constant([1], INT64), missing]
    absent = logits.graph.full(lengths, float("-inf"), FLOAT)
    return logits.graph.concat([logits, absent], 2)


def _sampled(
    graph: Graph, logits: Value, rows: Rows, kept_shape: tuple[int, int], variant: Variant
) -> Value:
    """Return the token of every row, [B, 1, 1] int64, and keep the row it was drawn from."""
    vocab_size = kept_shape[1]
    probs = adjusted(logits, rows.count(Count.DEPTH), rows, vocab_size=vocab_size, variant=variant)
    # A row that is not finite proposes token 0 as a point mass: rarely accepted, and exact.
    first = graph.ids(vocab_size).equals(0).cast(FLOAT)
    row = probs.is_finite.where(probs.probs, first)
    shape: list[int | str] = ["batch", 1, *kept_shape]
    kept = graph.input(names.KEPT_ROWS, FLOAT, shape)
    where = rows.count(Count.KEEP_AT).squeeze(2).squeeze(1)
    kept = graph.op("TensorScatter", kept, row.unsqueeze(1), where, axis=2)
    graph.output(names.NEW_KEPT_ROWS, kept, shape)
    token = draw(row, graph.input(names.DRAWS, INT64, ["batch", 1]).unsqueeze(2))
    rule = rows.count(Count.RULE)
    if variant is Variant.RACE:
        races = graph.input(names.RACES, FLOAT, ["batch", 1, vocab_size])
        token = rule.equals(Rule.RACE).where(race_winner(row, races, vocab_size), token)
    greatest = probs.is_finite.where(probs.order.argmax(vocab_size), 0)
    return rule.equals(Rule.GREEDY).where(greatest, token)
