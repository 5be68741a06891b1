"""Tokens of ragged spans as packed rows, and where attention finds them."""

import itertools

import numpy as np
import pytest
from outrider.engines.base import FloatArray, IntArray, Span
from outrider.engines.bundle.names import (
    CACHE_COLUMNS,
    EITHER_ROWS,
    LOGIT_POSITIONS,
    POSITIONS,
    QUERY_POSITIONS,
    ROW_HEADS,
    ROW_POSITIONS,
    START,
    TOKENS,
    WANTED_HEADS,
    head_rows_name,
)
from outrider.engines.onnx.packed_inputs import PackedGraph, PackedInputs, PackedShape, packed_feeds
from outrider.engines.onnx.packed_loops import spread

KV_HEADS, GROUP, LAST = 2, 3, 9
HEADS = KV_HEADS * GROUP


@pytest.fixture
def graph() -> PackedGraph:
    return graph_of("queries")


def graph_of(rows: str) -> PackedGraph:
    shapes = {
        TOKENS: [1, "rows"],
        head_rows_name(10): ["batch", 10, "tokens"],
        head_rows_name(2): ["batch", 2, "tokens"],
        ROW_HEADS: [1, "rows", HEADS, 3],
        ROW_POSITIONS: [1, "rows"],
        QUERY_POSITIONS: ["batch", 1, rows, 1],
    }
    graph = PackedGraph.of(shapes, num_kv_heads=KV_HEADS, last=LAST)
    assert graph is not None
    return graph


def spans(*rows: tuple[int, tuple[int, ...], int]) -> list[Span]:
    return [
        Span(slot=slot, start=start, tokens=tokens, num_logits=num_logits)
        for slot, (start, tokens, num_logits) in enumerate(rows)
    ]


def shape_of(given: list[Span]) -> PackedShape:
    lengths = [len(span.tokens) for span in given]
    wanted = [span.num_logits for span in given]
    return PackedShape(len(given), max(1, *lengths), max(1, *wanted), sum(lengths), sum(wanted))


def filled(inputs: PackedInputs, given: list[Span]) -> dict[str, IntArray | FloatArray]:
    shape = shape_of(given)
    inputs.reserve(shape)
    inputs.fill(given, shape)
    return inputs.views(shape)


def check(arrays: dict[str, IntArray | FloatArray], given: list[Span], group: int = GROUP) -> None:
    """Through the rectangle and back every packed row is itself, and what is wanted is found."""
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
    places = [min(given[row].start + at, LAST) for row, at in owners]
    assert arrays[ROW_POSITIONS][0, : len(tokens)].tolist() == places
    answers = np.zeros((len(given), HEADS // group, group * width), dtype=np.int64)
    for number, (row, at) in enumerate(owners):
        for head in range(HEADS):
            answers[row, head // group, head % group * width + at] = number * HEADS + head
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
            arrays[QUERY_POSITIONS][row, 0, :, 0], np.tile(expected, group)
        )


RAGGED = spans((0, (5, 6, 7), 3), (4, (8,), 1), (7, (), 0), (8, (1, 2), 1))


def test_rows_of_different_lengths_have_no_padding_among_them(graph: PackedGraph) -> None:
    arrays = filled(PackedInputs(graph, least_rows=1), RAGGED)
    assert arrays[TOKENS].shape == (1, 6)
    assert arrays[LOGIT_POSITIONS].shape == (5,)
    check(arrays, RAGGED)


def test_heads_are_apart_in_wide_calls_of_a_graph_that_takes_both(
    graph: PackedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engines.onnx.packed_inputs._LEAST_APART", 3)
    either = graph_of(EITHER_ROWS)
    inputs, narrow = PackedInputs(either, least_rows=1), spans((3, (1, 2), 1), (4, (), 0))
    for given, group in ((RAGGED, 1), (narrow, GROUP), (RAGGED, 1), (narrow, GROUP)):
        check(filled(inputs, given), given, group)
    check(filled(PackedInputs(graph, least_rows=1), RAGGED), RAGGED)


@pytest.mark.parametrize("least_rows", [1, 2])
def test_calls_of_all_shapes_follow_each_other(graph: PackedGraph, least_rows: int) -> None:
    """Each finds what those before it left in the arrays."""
    inputs = PackedInputs(graph, least_rows=least_rows)
    for given in (
        RAGGED,
        spans((3, (1,), 1)),
        spans((3, (), 0), (0, (1,), 1), (9, (4, 3, 2), 1)),
        spans((0, (5, 6), 2), (4, (8, 9), 2)),
        spans((3, (1,), 0), (0, (2, 2, 2), 2), (9, (), 0)),
        RAGGED,
    ):
        check(filled(inputs, given), given)


def test_larger_calls_have_room_made_for_them(
    graph: PackedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engines.onnx.packed_inputs._LEAST_ROOM", 2)
    inputs = PackedInputs(graph, least_rows=1)
    check(filled(inputs, spans((0, (5,), 1))), spans((0, (5,), 1)))
    before = inputs.arrays
    assert inputs.reserve(shape_of(RAGGED))
    assert inputs.arrays is not before
    assert not inputs.reserve(shape_of(RAGGED))
    for given in (RAGGED, spans((0, (5,), 1)), spans((0, (), 0), (1, (1, 2, 3, 4, 5, 6, 7), 0))):
        check(filled(inputs, given), given)


def test_padding_reads_what_there_is(graph: PackedGraph) -> None:
    """Whatever calls before it left in the arrays."""
    inputs = PackedInputs(graph, least_rows=2)
    filled(inputs, spans((0, (5, 6, 7), 3), (4, (8, 9), 1)))
    given = spans((3, (7,), 1))
    arrays = filled(inputs, given)
    assert arrays[TOKENS].tolist() == [[7, 0]]
    assert arrays[ROW_POSITIONS].tolist() == [[3, 0]]
    assert arrays[LOGIT_POSITIONS].tolist() == [0, 0]
    assert arrays[ROW_HEADS].shape == (1, 2, HEADS, 3)
    b, h, t = np.moveaxis(arrays[ROW_HEADS][0], -1, 0)
    assert (b.max(), h.max(), t.max()) == (0, KV_HEADS - 1, GROUP - 1)
    check(arrays, given)


def test_nothing_at_all_is_a_row_of_padding(graph: PackedGraph) -> None:
    arrays = filled(PackedInputs(graph, least_rows=1), spans((3, (), 0), (2, (), 0)))
    assert arrays[TOKENS].shape == (1, 1)
    for name in (head_rows_name(2), head_rows_name(10)):
        assert arrays[name].max() < 10


@pytest.mark.parametrize("wanted", list(itertools.product((0, 1, 3), repeat=3)))
def test_logits_are_moved_to_their_rows(wanted: tuple[int, ...]) -> None:
    most = max(1, *wanted)
    logits = np.full((3 * most, 2), -1, dtype=np.float32)
    logits[: sum(wanted)] = np.arange(sum(wanted))[:, None]
    spread(np.array([(3, count, 0) for count in wanted]), 3, most, logits)
    expected = iter(range(sum(wanted)))
    for row, count in enumerate(wanted):
        for number in range(row * most, row * most + count):
            assert logits[number].tolist() == [next(expected)] * 2


def test_a_rectangle_is_fed_as_its_rows(graph: PackedGraph) -> None:
    feeds = packed_feeds(graph, np.array([[1, 2], [3, 4]]), np.array([0, 9]), capacity=12)
    assert feeds[TOKENS].tolist() == [[1, 2, 3, 4]]
    assert feeds[LOGIT_POSITIONS].tolist() == [0, 1, 2, 3]
    assert feeds[POSITIONS].tolist() == [[0, 1], [9, 9]]
    assert feeds[CACHE_COLUMNS].tolist() == list(range(12))


def test_the_canonical_graph_packs_nothing() -> None:
    shapes = {TOKENS: ["batch", "tokens"]}
    assert PackedGraph.of(shapes, num_kv_heads=2, last=9) is None
