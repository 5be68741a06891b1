"""Inputs of ``grouped.onnx``: tokens as packed rows, their places, and the columns of the cache.

Rows of B spans of up to T tokens, of which N are real, one behind the other in the order of the spans:

    spans    [a0 a1 a2] [b0] [] [d0 d1]        B = 4, T = 3, N = 6
    packed   [a0 a1 a2   b0      d0 d1]

Attention sees the rectangle [B, T]. The places of rows follow from the spans' lengths; a graph that works them out by
itself runs a dozen nodes per call on a few numbers each, a tenth of a small model's call. Padding of a row repeats its
last token; a row without tokens shows any, which nobody reads: what it writes to its slot lies behind the slot's end,
and is overwritten or zeroed by the slot's next extend.

Calls of all shapes are written to the beginnings of the same arrays, so that a shape that was not seen yet needs no
memory of its own.

Knows no inference library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from outrider.engines.base import FloatArray, IntArray, Span
from outrider.engines.buffers import int64_view
from outrider.engines.bundle.names import (
    CACHE_COLUMNS,
    EITHER_ROWS,
    HEAD_ROWS,
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
from outrider.engines.kv_cache import MIN_SPAN
from outrider.engines.onnx.packed_loops import lay_out, number_heads

Shapes = Mapping[str, tuple[int, ...]]

# Packed rows, wanted ones and places of the rectangle that there is always room for: more than most steps decode.
_LEAST_ROOM = 256
# T from which attention to each head apart is no slower than to groups, and faster where a call's heads of the cache
# do not share out evenly among threads, which take one each. (ONNX Runtime 1.31.1, two threads, 4,000 columns: 64
# tokens of 9 heads in 3 groups take 7.9 ms and 13.1, of 12 in 2 groups 17.6 and 15.5; 256 tokens 25 and 49, 54 and 59.)
_LEAST_APART = 64


class PackedShape(NamedTuple):
    """Sizes of a call.

    Attributes:
        num_rows: B.
        num_tokens: T, of the longest span; at least 1.
        num_wanted: R, logits of the span that wants most; at least 1.
        all_tokens: of all spans together.
        all_wanted: likewise.
    """

    num_rows: int
    num_tokens: int
    num_wanted: int
    all_tokens: int
    all_wanted: int


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """Inputs that a ``grouped.onnx`` takes.

    Attributes:
        head_counts: h of each input ``head_rows_name(h)``.
        num_heads: of the queries.
        group: G, query heads per head of the cache.
        takes_apart: whether attention takes queries of grouped heads or of heads apart, as they are given.
        last: greatest position that the model knows.
        takes_row_positions: whether packed rows look up their places.
    """

    head_counts: tuple[int, ...]
    num_heads: int
    group: int
    takes_apart: bool
    last: int
    takes_row_positions: bool

    @classmethod
    def of(
        cls, shapes: Mapping[str, Sequence[object]], *, num_kv_heads: int, last: int
    ) -> PackedGraph | None:
        """From shapes of inputs by name; None where the graph packs no rows.

        Args:
            shapes: axes of unknown size are names.
            num_kv_heads: H of the cache.
            last: greatest position that the model knows.
        """
        if ROW_HEADS not in shapes:
            return None
        num_heads = shapes[ROW_HEADS][2]
        assert isinstance(num_heads, int)
        counts = (shape[1] for name, shape in shapes.items() if name.startswith(HEAD_ROWS))
        return cls(
            head_counts=tuple(sorted(count for count in counts if isinstance(count, int))),
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            takes_apart=EITHER_ROWS in shapes.get(QUERY_POSITIONS, ()),
            last=last,
            takes_row_positions=ROW_POSITIONS in shapes,
        )

    @property
    def least_tokens(self) -> int:
        """T at least: a head of the cache that a single query reads has another kernel, and other bits."""
        return max(1, MIN_SPAN // self.group)

    def group_of(self, width: int) -> int:
        """Query heads whose rows attention sees as those of one, in a call T tokens wide."""
        return 1 if self.takes_apart and width >= _LEAST_APART else self.group

    @property
    def extra_inputs(self) -> frozenset[str]:
        """Names of inputs beside those of ``model.onnx``."""
        heads = map(head_rows_name, self.head_counts)
        places = {ROW_POSITIONS} if self.takes_row_positions else set()
        return frozenset(
            {POSITIONS, QUERY_POSITIONS, CACHE_COLUMNS, ROW_HEADS, WANTED_HEADS, *heads, *places}
        )

    def of_tokens(self, count: int) -> Shapes:
        """Shapes of the inputs with N rows."""
        places = {ROW_POSITIONS: (1, count)} if self.takes_row_positions else {}
        return {TOKENS: (1, count), ROW_HEADS: (1, count, self.num_heads, 3), **places}

    def of_wanted(self, count: int) -> Shapes:
        """Shapes of the inputs with M rows."""
        return {LOGIT_POSITIONS: (count,), WANTED_HEADS: (1, count, self.num_heads, 3)}

    def of_rectangle(self, num_rows: int, width: int) -> Shapes:
        """Shapes of the inputs that attention's rectangle [B, T] fixes."""
        places = (num_rows, 1, self.group_of(width) * width, 1)
        heads = {head_rows_name(h): (num_rows, h, width) for h in self.head_counts}
        return {START: (num_rows,), POSITIONS: (num_rows, width), QUERY_POSITIONS: places, **heads}


class PackedInputs:
    """Arrays that all calls of a model share, written before each.

    Args:
        graph: which will read them.
        least_rows: packed rows, and wanted ones, are at least so many; what is missing is padding.
        room: packed rows, wanted ones and places of the rectangle that are expected.

    Attributes:
        arrays: by name of the input, flat, longer than a call's, int64 where not said otherwise; of a call the
            beginnings are tokens [1, N], start [B], logit_positions [M] among the N, positions [B, T], query_positions
            [B, 1, G*T or T, 1] float32, row_heads [1, N, heads, 3], wanted_heads [1, M, heads, 3], each head_rows.h
            [B, h, T], row_positions [1, N] where the graph takes them.
        spans: [at least B, 3] int64, tokens, wanted logits and start of each span of the call.
    """

    def __init__(self, graph: PackedGraph, *, least_rows: int, room: int = 0) -> None:
        self._graph, self._least_rows = graph, least_rows
        self._allocate((max(room, _LEAST_ROOM),) * 3)

    def counts(self, shape: PackedShape) -> tuple[int, int]:
        """N and M of a call, padding included."""
        return max(shape.all_tokens, self._least_rows), max(shape.all_wanted, self._least_rows)

    def reserve(self, shape: PackedShape) -> bool:
        """Make room for a call; whether the arrays were replaced."""
        needed = (shape.num_rows * shape.num_tokens, *self.counts(shape))
        if all(size <= room for size, room in zip(needed, self._room, strict=True)):
            return False
        self._allocate(
            tuple(
                room if size <= room else max(size, 2 * room)
                for size, room in zip(needed, self._room, strict=True)
            )
        )
        return True

    def fill(self, spans: Sequence[Span], shape: PackedShape) -> None:
        """Write spans of a shape that there is room for."""
        cells, tokens = self._cells, self._tokens
        at = end = 0
        for span in spans:
            cells[at] = len(span.tokens)
            cells[at + 1] = span.num_logits
            cells[at + 2] = span.start
            at += 3
            for token in span.tokens:
                tokens[end] = token
                end += 1
        graph, num_rows, width = self._graph, shape.num_rows, shape.num_tokens
        num_tokens, num_wanted = self.counts(shape)
        lay_out(
            self.spans, num_rows, width, num_tokens, num_wanted, graph.group_of(width), graph.last, *self._laid_out
        )  # fmt: skip
        for count, head_rows in self._head_rows:
            number_heads(self.spans, num_rows, width, count, head_rows)

    def views(self, shape: PackedShape) -> dict[str, IntArray | FloatArray]:
        """The inputs of a call."""
        num_tokens, num_wanted = self.counts(shape)
        return {
            name: self.arrays[name][: math.prod(axes)].reshape(axes)
            for shapes in (
                self._graph.of_tokens(num_tokens),
                self._graph.of_wanted(num_wanted),
                self._graph.of_rectangle(shape.num_rows, shape.num_tokens),
            )
            for name, axes in shapes.items()
        }

    def _allocate(self, room: tuple[int, ...]) -> None:
        num_places, num_tokens, num_wanted = room
        graph = self._graph
        shapes = {
            **graph.of_tokens(num_tokens),
            **graph.of_wanted(num_wanted),
            **graph.of_rectangle(num_places, 1),
        }
        sizes = {name: math.prod(axes) for name, axes in shapes.items()}
        places = np.zeros(sizes.pop(QUERY_POSITIONS), dtype=np.float32)
        integers = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
        spans = np.zeros((num_places, 3), dtype=np.int64)
        row_positions = integers.get(ROW_POSITIONS, np.zeros(num_tokens, dtype=np.int64))
        # Nothing is replaced before there is the memory for all.
        self._room = room
        self.arrays: dict[str, IntArray | FloatArray] = {**integers, QUERY_POSITIONS: places}
        self.spans: IntArray = spans
        self._cells, self._tokens = int64_view(spans), int64_view(integers[TOKENS])
        row_heads, wanted_heads = (
            integers[name].reshape(-1, graph.num_heads, 3) for name in (ROW_HEADS, WANTED_HEADS)
        )
        tokens, starts, wanted, positions = (
            integers[name] for name in (TOKENS, START, LOGIT_POSITIONS, POSITIONS)
        )
        self._laid_out = (
            tokens, starts, wanted, positions, row_positions, places, row_heads, wanted_heads
        )  # fmt: skip
        self._head_rows = [(h, integers[head_rows_name(h)]) for h in graph.head_counts]


def packed_feeds(
    graph: PackedGraph, tokens: IntArray, start: IntArray, *, capacity: int
) -> Mapping[str, IntArray | FloatArray]:
    """Inputs of one call in which all logits are wanted, for callers that bind none.

    Args:
        graph: to be fed.
        tokens: [B, T] int64.
        start: [B] int64.
        capacity: S.
    """
    num_rows, width = tokens.shape
    at_least = max(width, graph.least_tokens)
    shape = PackedShape(num_rows, at_least, width, tokens.size, tokens.size)
    inputs = PackedInputs(graph, least_rows=1)
    inputs.reserve(shape)
    rows = enumerate(zip(start.tolist(), tokens.tolist(), strict=True))
    inputs.fill(
        [
            Span(slot=slot, start=first, tokens=tuple(row), num_logits=width)
            for slot, (first, row) in rows
        ],
        shape,
    )
    return {**inputs.views(shape), CACHE_COLUMNS: cache_columns(capacity)}


def cache_columns(capacity: int) -> FloatArray:
    """[S] float32, the numbers of the cache's columns."""
    return np.arange(capacity, dtype=np.float32)
