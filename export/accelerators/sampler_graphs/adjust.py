"""Adjusted probabilities of the next token at every position: bans, penalties, temperature, truncation.

The order is that of ``engines.sampling.base.SamplingParams``. TensorRT has no type wider than float32, so sums are
arranged to stay exact: a processor's difference is added after the greatest raw logit was subtracted, and masses are
integers. Positions share no state: the effect of earlier draft tokens is computed from them on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import (
    FRACTION_BITS,
    Count,
    Flag,
    Setting,
    Variant,
)
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Graph, Value
from outrider.export.accelerators.sampler_graphs.truncate import to_fixed, truncated

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs of a graph about its rows.

    Attributes:
        draft_tokens: [B, R] int64.
        counts: [B, 8] int64, columns ``Count``.
        settings: [B, 8] float32, columns ``Setting``; None in greedy graphs.
        lists: the padded lists of ``tensors.LISTS`` of the engines; empty in graphs without processors.
    """

    draft_tokens: Value
    counts: Value
    settings: Value | None
    lists: Mapping[str, Value]

    def count(self, column: Count) -> Value:
        """Return one column of the counts, [B, 1, 1] int64."""
        return self.counts.slice(column, column + 1, 1).unsqueeze(2)

    def setting(self, column: Setting) -> Value:
        """Return one column of the settings, [B, 1, 1] float32."""
        assert self.settings is not None
        return self.settings.slice(column, column + 1, 1).unsqueeze(2)

    def has_flag(self, *flags: Flag) -> Value:
        """Return whether a row's flags are one of these two, [B, 1, 1] bool."""
        value = self.count(Count.FLAGS)
        return value.equals(flags[0]) | value.equals(flags[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Adjusted rows; one that is not finite is replaced by equal logits.

    Attributes:
        order: [B, R, V] float32, processed logits.
        exponents: [B, R, V] float32, processed logits below their greatest, at temperature 1.
        probs: [B, R, V] float32, sums to 1 up to rounding.
        is_finite: [B, R, 1] bool; false where a row holds NaN, +inf or nothing but -inf.
    """

    order: Value
    exponents: Value
    probs: Value
    is_finite: Value


def declare_rows(graph: Graph, variant: Variant) -> Rows:
    """Declare the inputs of a graph that describe its rows."""
    listed = names.LISTS if variant.is_full else ()
    lists = {name: graph.input(name, *_list_type(name)) for name in listed}
    settings = None
    if variant.has_rows:
        settings = graph.input(names.SETTINGS, FLOAT, ["batch", names.NUM_SETTINGS])
    return Rows(
        draft_tokens=graph.input(names.DRAFT_TOKENS, INT64, ["batch", "positions"]),
        counts=graph.input(names.COUNTS, INT64, ["batch", names.NUM_COUNTS]),
        settings=settings,
        lists=lists,
    )


def _list_type(name: str) -> tuple[int, list[int | str]]:
    kind = FLOAT if name in (names.SEEN_COUNTS, names.BIAS_VALUES) else INT64
    return kind, ["batch", *names.LISTS[name]]


def adjusted(
    logits: Value, positions: Value, rows: Rows, *, vocab_size: int, variant: Variant
) -> Adjusted:
    """Return the adjusted rows of logits [B, R, V] float32.

    ``positions`` [B or 1, R, 1] int64 counts the draft tokens before each position. Only the full variant has
    processors and truncation.
    """
    if variant.is_full:
        delta, is_banned = _processed(logits, positions, rows, vocab_size)
        is_usable = ~is_banned & (logits > -_INFINITY)
    else:
        delta, is_usable = None, logits > -_INFINITY
    is_finite = finite_rows(logits, None if delta is None else is_banned)
    greatest = is_usable.where(logits, -_INFINITY).max()
    changed = logits if delta is None else logits + delta
    shifted = logits - greatest
    shifted = shifted if delta is None else shifted + delta
    order = is_finite.where(is_usable.where(changed, -_INFINITY), 0.0)
    exponents = is_finite.where(is_usable.where(shifted, -_INFINITY), 0.0)
    exponents = exponents - exponents.max()
    weights = logits.graph.op("Exp", exponents / rows.setting(Setting.TEMPERATURE))
    min_p = rows.setting(Setting.MIN_P)
    if variant.is_full:
        top_k, top_p = rows.count(Count.TOP_K), rows.count(Count.TOP_P)
        weights = truncated(order, weights, top_k=top_k, top_p=top_p, min_p=min_p)
    else:
        weights = (weights >= min_p).where(weights, 0.0)
    total = to_fixed(weights).sum().cast(FLOAT) * 2.0**-FRACTION_BITS
    return Adjusted(order=order, exponents=exponents, probs=weights / total, is_finite=is_finite)


def finite_rows(logits: Value, is_banned: Value | None) -> Value:
    """Return which rows have a finite greatest logit, [B, R, 1] bool; banned logits do not count."""
    graph = logits.graph
    is_wrong = graph.op("IsNaN", logits) | (logits >= _INFINITY)
    is_usable = logits > -_INFINITY
    if is_banned is not None:
        is_wrong, is_usable = is_wrong & ~is_banned, is_usable & ~is_banned
    return ~_any(is_wrong) & _any(is_usable)


def _any(is_true: Value) -> Value:
    return is_true.cast(FLOAT).max() > 0.0


def _processed(logits: Value, positions: Value, rows: Rows, vocab_size: int) -> tuple[Value, Value]:
    """Return the sum of bias and penalties, [B, R, V] float32, and the banned tokens, [B, R, V] bool."""
    lists = rows.lists
    bias = _spread(lists[names.BIAS_IDS], lists[names.BIAS_VALUES], vocab_size).unsqueeze(1)
    base = _spread(lists[names.SEEN_IDS], lists[names.SEEN_COUNTS], vocab_size).unsqueeze(1)
    drafted = _drafted_before(positions, rows.draft_tokens, vocab_size)
    num_output = logits.graph.op("Max", base - 1.0, 0.0) + drafted
    biased = logits + bias
    factor = (biased > 0.0).where(rows.setting(Setting.UP), rows.setting(Setting.DOWN))
    is_seen = (base > 0.0) | (drafted > 0.0)
    repeated = is_seen.where(biased * factor, 0.0)
    penalty = rows.setting(Setting.PRESENCE) + rows.setting(Setting.FREQUENCY) * num_output
    delta = bias + repeated - (num_output > 0.0).where(penalty, 0.0)
    return delta, _banned(positions, rows, vocab_size)


def _banned(positions: Value, rows: Rows, vocab_size: int) -> Value:
    """Return ids not allowed, last tokens of bad words and early ends, [B, R, V] bool."""
    lists = rows.lists
    is_allowed = _marked(lists[names.ALLOWED_IDS], vocab_size).unsqueeze(1)
    is_out = rows.has_flag(Flag.ALLOWED, Flag.POINT_MASS_ALLOWED) & ~is_allowed
    is_end = _marked(lists[names.END_IDS], vocab_size).unsqueeze(1)
    is_early = (positions < rows.count(Count.END_BANNED)) & is_end
    return is_out | is_early | _bad(positions, rows, vocab_size)


def _bad(positions: Value, rows: Rows, vocab_size: int) -> Value:
    """Return last tokens of bad words whose other tokens were just produced, [B, R, V] bool."""
    graph, lists = positions.graph, rows.lists
    prefixes = lists[names.BAD_PREFIXES]
    length = prefixes.length(2)
    # Token j of the window that ends before a position is at position + j of this sequence.
    sequence = graph.concat([lists[names.RECENT], rows.draft_tokens], 1).unsqueeze(1)
    columns = positions + graph.ids(length).unsqueeze(0).unsqueeze(0)  # [B or 1, R, P]
    batch, count = sequence.length(0), columns.length(1)
    columns = graph.op("Expand", columns, graph.concat([batch, count, length], 0))
    lengths = graph.concat([batch, count, sequence.length(2)], 0)
    windows = graph.op("Expand", sequence, lengths).pick(columns)
    wanted = prefixes.unsqueeze(1)  # [B, 1, W, P]
    is_same = wanted.equals(windows.unsqueeze(2)) | wanted.equals(names.NO_TOKEN)
    is_due = is_same.cast(FLOAT).min(keepdims=False) > 0.0  # [B, R, W]
    lasts = lists[names.BAD_LASTS].unsqueeze(1)
    return _marked(is_due.where(lasts, vocab_size), vocab_size, rank=3)


def _drafted_before(positions: Value, draft_tokens: Value, vocab_size: int) -> Value:
    """Count each token among the draft tokens before each position, [B, R, V] float32."""
    graph = positions.graph
    is_token = draft_tokens.unsqueeze(2).equals(graph.ids(vocab_size))
    columns = graph.ids(draft_tokens.length(1)).unsqueeze(0).unsqueeze(0)
    is_before = (columns < positions).cast(FLOAT)
    return graph.op("MatMul", is_before, is_token.cast(FLOAT))


def _marked(ids: Value, vocab_size: int, *, rank: int = 2) -> Value:
    """Return [..., V] bool, true at the ids."""
    ones = ids.equals(ids).cast(FLOAT)
    return _spread(ids, ones, vocab_size, rank=rank) > 0.0


def _spread(ids: Value, values: Value, vocab_size: int, *, rank: int = 2) -> Value:
    """Return [..., V] float32: ``values`` at ``ids`` [..., N], 0 elsewhere; the id V is padding.

    An id may stand twice only with equal values: TensorRT's scatter cannot add.
    """
    graph = ids.graph
    shape = [ids.length(axis) for axis in range(rank - 1)]
    empty = graph.full([*shape, graph.constant([vocab_size + 1], INT64)], 0.0, FLOAT)
    spread = graph.op("ScatterElements", empty, ids, values, axis=rank - 1)
    return spread.slice(0, vocab_size, rank - 1)
