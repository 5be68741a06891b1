"""Tokens of ragged spans as packed rows, and where attention finds them."""

import numpy as np
import pytest

from engines.base import Span
from engines.bundle import (
    CACHE_COLUMNS,
    LOGIT_POSITIONS,
    POSITIONS,
    QUERY_POSITIONS,
    ROW_HEADS,
    START,
    TOKENS,
    WANTED_HEADS,
    head_rows_name,
)
from engines.packed_inputs import PackedGraph, PackedInputs, PackedShape, packed_feeds

KV_HEADS, GROUP, LAST, LONGEST = 2, 3, 9, 4
HEADS = KV_HEADS * GROUP


@pytest.fixture
def graph() -> PackedGraph:
    shapes = {
        TOKENS: [1, "rows"],
        head_rows_name(10): ["batch", 10, "tokens"],
        head_rows_name(2): ["batch", 2, "tokens"],
        ROW_HEADS: [1, "rows", HEADS, 3],
    }
    graph = PackedGraph.of(shapes, num_kv_heads=KV_HEADS, last=LAST, longest=LONGEST)
    assert graph is not None
    return graph


def spans(*rows: tuple[int, tuple[int, ...], int]) -> list[Span]:
    return [
        Span(slot=slot, start=start, tokens=tokens, num_logits=num_logits)
        for slot, (start, tokens, num_logits) in enumerate(rows)
    ]


def inputs_for(graph: PackedGraph, given: list[Span], least_rows: int = 1) -> PackedInputs:
    lengths = [len(span.tokens) for span in given]
    wanted = [span.num_logits for span in given]
    shape = PackedShape(len(given), max(1, *lengths), max(1, *wanted), sum(lengths), sum(wanted))
    return PackedInputs(graph, shape, capacity=12, least_rows=least_rows)


def check(inputs: PackedInputs, given: list[Span]) -> None:
    """Through the rectangle and back every packed row is itself, and what is wanted is found."""
    arrays = inputs.arrays
    tokens = [token for span in given for token in span.tokens]
    assert arrays[TOKENS][0, : len(tokens)].tolist() == tokens
    assert arrays[START].tolist() == [span.start for span in given]
    owners = [(row, at) for row, span in enumerate(given) for at in range(len(span.tokens))]
    width = arrays[POSITIONS].shape[1]
    for count in (2, 10):
        # Entry (n, h) says so by its number.
        flat = np.arange(len(tokens) * count)
        found = flat[arrays[head_rows_name(count)]]
        for number, (row, at) in enumerate(owners):
            np.testing.assert_array_equal(found[row, :, at], number * count + np.arange(count))
        for row, span in enumerate(given):
            for at in range(len(span.tokens), width) if span.tokens else ():
                np.testing.assert_array_equal(found[row, :, at], found[row, :, at - 1])
    answers = np.zeros((len(given), KV_HEADS, GROUP * width), dtype=np.int64)
    for number, (row, at) in enumerate(owners):
        for head in range(HEADS):
            answers[row, head // GROUP, head % GROUP * width + at] = number * HEADS + head
    b, h, t = np.moveaxis(arrays[ROW_HEADS][0], -1, 0)
    found = answers[b, h, t]
    np.testing.assert_array_equal(found[: len(tokens)].ravel(), np.arange(len(tokens) * HEADS))
    ends = np.cumsum([len(span.tokens) for span in given])
    wanted = [
        end - span.num_logits + number
        for end, span in zip(ends, given, strict=True)
        for number in range(span.num_logits)
    ]
    assert arrays[LOGIT_POSITIONS][: len(wanted)].tolist() == wanted
    np.testing.assert_array_equal(
        arrays[WANTED_HEADS], arrays[ROW_HEADS][:, arrays[LOGIT_POSITIONS]]
    )
    for row, span in enumerate(given):
        expected = np.minimum(span.start + np.arange(width), LAST)
        np.testing.assert_array_equal(arrays[POSITIONS][row], expected)
        np.testing.assert_array_equal(
            arrays[QUERY_POSITIONS][row, 0, :, 0], np.tile(expected, GROUP)
        )
    np.testing.assert_array_equal(arrays[CACHE_COLUMNS], np.arange(12))


def test_rows_of_different_lengths_have_no_padding_among_them(graph: PackedGraph) -> None:
    given = spans((0, (5, 6, 7), 3), (4, (8,), 1), (7, (), 0), (8, (1, 2), 1))
    inputs = inputs_for(graph, given)
    inputs.fill(given)
    assert inputs.arrays[TOKENS].shape == (1, 6)
    assert inputs.arrays[LOGIT_POSITIONS].shape == (5,)
    check(inputs, given)


def test_a_call_is_filled_again_by_other_spans_of_as_many_tokens(graph: PackedGraph) -> None:
    first = spans((0, (5, 6, 7), 2), (4, (8,), 0), (1, (), 0))
    inputs = inputs_for(graph, first)
    bound = dict(inputs.arrays)
    for given in (
        first,
        spans((3, (), 0), (0, (1,), 1), (9, (4, 3, 2), 1)),
        spans((3, (1,), 0), (0, (2, 2, 2), 2), (9, (), 0)),
        first,
    ):
        inputs.fill(given)
        check(inputs, given)
    assert all(inputs.arrays[name] is array for name, array in bound.items())


def test_even_spans_are_laid_out_once(graph: PackedGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    given = spans((0, (5, 6), 2), (4, (8, 9), 2))
    inputs = inputs_for(graph, given)
    monkeypatch.setattr(PackedInputs, "_lay_out", None)
    inputs.fill(given)
    check(inputs, given)


def test_a_row_alone_is_padded_where_bits_need_two(graph: PackedGraph) -> None:
    given = spans((3, (7,), 1))
    inputs = inputs_for(graph, given, least_rows=2)
    inputs.fill(given)
    assert inputs.arrays[TOKENS].shape == (1, 2)
    assert inputs.arrays[LOGIT_POSITIONS].shape == (2,)
    check(inputs, given)


def test_nothing_at_all_is_a_row_of_padding(graph: PackedGraph) -> None:
    given = spans((3, (), 0), (2, (), 0))
    inputs = inputs_for(graph, given)
    inputs.fill(given)
    assert inputs.arrays[TOKENS].shape == (1, 1)
    for name in (head_rows_name(2), head_rows_name(10)):
        assert inputs.arrays[name].max() < 10


def test_a_rectangle_is_fed_as_its_rows(graph: PackedGraph) -> None:
    feeds = packed_feeds(graph, np.array([[1, 2], [3, 4]]), np.array([0, 9]), capacity=12)
    assert feeds[TOKENS].tolist() == [[1, 2, 3, 4]]
    assert feeds[LOGIT_POSITIONS].tolist() == [0, 1, 2, 3]
    assert feeds[POSITIONS].tolist() == [[0, 1], [9, 9]]


def test_the_canonical_graph_packs_nothing() -> None:
    shapes = {TOKENS: ["batch", "tokens"]}
    assert PackedGraph.of(shapes, num_kv_heads=2, last=9, longest=4) is None
