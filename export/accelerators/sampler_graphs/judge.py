"""The graph that judges whole drafts: the number of accepted tokens and the token that follows.

All positions of all rows are adjusted and tested at once; the first that is not kept decides. One token is then
drawn per row: from the residual after a rejection by the ratio test, else from the target's row. The output is one
tensor of integers per step.

Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1 and appendix A.5; p is the target row,
q the draft row.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import (
    Count,
    Flag,
    Rule,
    Setting,
    Variant,
)
from outrider.export.accelerators.sampler_graphs.adjust import (
    Adjusted,
    Rows,
    adjusted,
    declare_rows,
    finite_rows,
)
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Graph, Value
from outrider.export.accelerators.sampler_graphs.draw import at, draw, is_drawn, race_winner, scaled
from outrider.export.accelerators.sampler_graphs.truncate import to_fixed

# Below this the float32 difference of two rows is rounding, not mass.
_SMALLEST_RESIDUAL = int(1e-6 * (1 << names.FRACTION_BITS))


def judge_graph(variant: Variant, *, vocab_size: int, depth: int) -> onnx.ModelProto:
    """Return the graph of one variant over ``vocab_size`` tokens that reads ``depth`` kept rows."""
    graph = Graph(f"judge_{variant}")
    logits = graph.input(names.LOGITS, FLOAT, ["batch", "positions", vocab_size])
    rows = declare_rows(graph, variant)
    columns = graph.ids(rows.draft_tokens.length(1)).unsqueeze(0).unsqueeze(2)  # [1, R, 1]
    is_draft = columns < rows.count(Count.GAMMA)
    if not variant.has_rows:
        best, is_finite = logits.argmax(vocab_size), finite_rows(logits, None)
        is_kept = best.equals(rows.draft_tokens.unsqueeze(2))
        num_accepted = _num_leading(is_kept & is_draft & is_finite)
        none = num_accepted * 0
        overlaps = rows.draft_tokens * 0
        answers = [num_accepted, _chosen(best, num_accepted), none, overlaps]
        _answer(graph, answers, is_finite)
        return graph.model()
    probs = adjusted(logits, columns, rows, vocab_size=vocab_size, variant=variant)
    test = _Test(graph, probs, rows, (depth, vocab_size), variant)
    num_accepted = _num_leading(test.is_kept() & is_draft & probs.is_finite)
    next_token, num_fallbacks = test.following(num_accepted)
    overlaps = (is_draft & test.has_overlap).where(test.overlaps(), 0).squeeze(2)
    _answer(graph, [num_accepted, next_token, num_fallbacks, overlaps], probs.is_finite)
    return graph.model()


class _Test:
    """The four rules at all positions of all rows, over the adjusted rows."""

    def __init__(
        self,
        graph: Graph,
        probs: Adjusted,
        rows: Rows,
        kept_shape: tuple[int, int],
        variant: Variant,
    ) -> None:
        vocab_size = kept_shape[1]
        self._adjusted, self._rows, self._vocab_size = probs, rows, vocab_size
        self._ids = graph.ids(vocab_size)
        self._tokens = rows.draft_tokens.unsqueeze(2)
        self._rule = rows.count(Count.RULE)
        width = rows.draft_tokens.length(1)
        kept = graph.input(names.KEPT_ROWS, FLOAT, ["batch", 1, *kept_shape])
        is_point = rows.has_flag(Flag.POINT_MASS, Flag.POINT_MASS_ALLOWED)
        point_mass = self._ids.equals(self._tokens).cast(FLOAT)
        self._draft_rows = is_point.where(point_mass, kept.squeeze(1).head(width, 1))
        self._coins = graph.input(names.COINS, INT64, ["batch", "positions"]).unsqueeze(2)
        self._draws = graph.input(names.DRAWS, INT64, ["batch", "positions"]).unsqueeze(2)
        self._best = probs.order.argmax(vocab_size)
        self._winner: Value | None = None
        if variant is Variant.RACE:
            races = graph.input(names.RACES, FLOAT, ["batch", "positions", vocab_size])
            self._winner = race_winner(probs.probs, races, vocab_size)
        self.has_overlap = self._rule.equals(Rule.RATIO) & ~is_point

    def is_kept(self) -> Value:
        """Return whether the draft token of each position is kept, [B, R, 1] bool."""
        tokens, probs = self._tokens, self._adjusted
        is_kept = is_drawn(probs.probs, tokens, self._draws, self._ids)
        is_kept = self._choose(Rule.RATIO, self._passes_ratio(), is_kept)
        if self._winner is not None:
            is_kept = self._choose(Rule.RACE, self._winner.equals(tokens), is_kept)
        return self._choose(Rule.GREEDY, self._is_great(), is_kept)

    def following(self, num_accepted: Value) -> tuple[Value, Value]:
        """Return the token after the kept ones, [B, 1] int64, and whether p replaced an empty residual, [B, 1]."""
        target = _row(self._adjusted.probs, num_accepted)
        draft = _row(self._draft_rows, num_accepted)
        is_rejected = num_accepted.unsqueeze(2) < self._rows.count(Count.GAMMA)
        wants_residual = self._rule.equals(Rule.RATIO) & is_rejected
        residual = target.graph.op("Max", target - draft, 0.0)
        is_empty = to_fixed(residual).sum() <= _SMALLEST_RESIDUAL
        row = (wants_residual & ~is_empty).where(residual, target)
        uniform = _chosen(self._draws, num_accepted).unsqueeze(2)
        token = draw(row, uniform).squeeze(2)
        if self._winner is not None:
            winner = _chosen(self._winner, num_accepted)
            token = self._rule.squeeze(2).equals(Rule.RACE).where(winner, token)
        best = _chosen(self._best, num_accepted)
        token = self._rule.squeeze(2).equals(Rule.GREEDY).where(best, token)
        return token, (wants_residual & is_empty).cast(INT64).squeeze(2)

    def overlaps(self) -> Value:
        """Return the sum of min(p, q) at each position, [B, R, 1] int64 in units of 2 ** -42."""
        lesser = self._ids.graph.op("Min", self._adjusted.probs, self._draft_rows)
        return to_fixed(lesser).sum()

    def _choose(self, rule: Rule, yes: Value, no: Value) -> Value:
        is_rule = self._rule.equals(rule)
        return (is_rule & yes) | (~is_rule & no)

    def _passes_ratio(self) -> Value:
        """Compare u * lenience * q(x) < p(x) in integers; equality and p(x) = 0 fail."""
        lenience = self._rows.setting(Setting.LENIENCE)
        draft = to_fixed(at(self._draft_rows, self._tokens, self._vocab_size) * lenience)
        target = to_fixed(at(self._adjusted.probs, self._tokens, self._vocab_size))
        return scaled(draft, self._coins) < target

    def _is_great(self) -> Value:
        """Return whether a token is the greatest, or has ``lenience`` times its probability."""
        tokens, lenience = self._tokens, self._rows.setting(Setting.GREEDY_LENIENCE)
        ratios = self._ids.graph.op("Exp", self._adjusted.exponents)
        is_near = at(ratios, tokens, self._vocab_size) >= lenience
        return self._best.equals(tokens) | ((lenience > 0.0) & is_near)


def _num_leading(is_kept: Value) -> Value:
    """Return the number of leading kept positions, [B, 1] int64; ``is_kept`` is [B, R, 1]."""
    num_rejected = (~is_kept).squeeze(2).cast(INT64).cumsum()
    return num_rejected.equals(0).cast(INT64).sum()


def _chosen(values: Value, position: Value) -> Value:
    """Return ``values`` [B, R, 1] at ``position`` [B, 1]; [B, 1]."""
    return values.squeeze(2).pick(position)


def _row(rows: Value, position: Value) -> Value:
    """Return ``rows`` [B, R, V] at ``position`` [B, 1]; [B, 1, V]."""
    return rows.graph.op("GatherND", rows, position.unsqueeze(2), batch_dims=1)


def _answer(graph: Graph, values: Sequence[Value], is_finite: Value) -> None:
    """Write [num_accepted, next token, whether that row is finite, fallbacks, overlaps] per row."""
    num_accepted, next_token, num_fallbacks, overlaps = values
    is_sound = _chosen(is_finite.cast(INT64), num_accepted)
    answers = graph.concat([num_accepted, next_token, is_sound, num_fallbacks, overlaps], 1)
    graph.output(names.ANSWERS, answers, ["batch", "answers"])
