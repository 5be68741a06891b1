"""The graph that draws one draft token per row and keeps the law it was drawn from.

Column 0 of the draft model's logits counts; ids beyond the target's vocabulary are never proposed,
ids that the draft lacks have no mass. The token goes out as [B, 1], which is what the draft model
is fed next, and into ``draft_tokens``, which the next proposal and the judgement read: gamma draft
steps and the judgement follow one another without a value passing through the host.
"""

from __future__ import annotations

import onnx
from outrider.engines.device.sampling import tensors as names
from outrider.engines.device.sampling.tensors import Count, Rule, Variant
from outrider.export.sampler_graphs.adjust import Rows, adjusted, declare_rows, finite_rows
from outrider.export.sampler_graphs.builder import FLOAT, INT64, Graph, Value
from outrider.export.sampler_graphs.draw import draw, race_winner


def propose_graph(
    variant: Variant, *, vocab_size: int, draft_vocab_size: int, depth: int
) -> onnx.ModelProto:
    """The graph of one variant.

    Args:
        variant: how much it can do.
        vocab_size: V of the target.
        draft_vocab_size: V of the draft model.
        depth: D, positions that are kept. Fixed: TensorRT updates no cache of unknown length.
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
    """Logits over the target's vocabulary."""
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
    """The token of every row, [B, 1, 1] int64; its law goes into the kept rows."""
    vocab_size = kept_shape[1]
    probs = adjusted(logits, rows.count(Count.DEPTH), rows, vocab_size=vocab_size, variant=variant)
    # A row that is not finite proposes token 0 as a point mass: a poor draft, and an exact one.
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
