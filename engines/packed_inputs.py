"""What ``grouped.onnx`` is told: tokens as packed rows, where they stand, and which columns the cache has.

Rows of B spans of up to T tokens, of which N are real, one behind the other in the order of the spans:

    spans    [a0 a1 a2] [b0] [] [d0 d1]        B = 4, T = 3, N = 6
    packed   [a0 a1 a2   b0      d0 d1]

Attention sees the rectangle [B, T]; what stands where follows from the spans' lengths, and a graph that works
it out by itself runs a dozen nodes per call on a few numbers each, a tenth of a small model's call (python -m
scripts.bench_graph). Padding of a row repeats its last token; a row without tokens shows any, which nobody reads: what
it writes to its slot lies behind the slot's end, and is overwritten or zeroed by the slot's next extend.

Knows no inference library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.base import FloatArray, IntArray, Span
from engines.bundle import (
    CACHE_COLUMNS,
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
from engines.kv_cache import MIN_SPAN
from engines.packed_loops import choose, lay_out, number_heads
from engines.small_arrays import elements, float_elements


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

    @property
    def is_even(self) -> bool:
        """Whether all spans have T tokens and want R logits."""
        return (
            self.all_tokens == self.num_rows * self.num_tokens
            and self.all_wanted == self.num_rows * self.num_wanted
        )


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """What a ``grouped.onnx`` asks for, and numbers that all its calls read.

    Attributes:
        head_counts: h of each input ``head_rows_name(h)``.
        num_heads: of the queries.
        group: G, query heads per head of the cache.
        positions: elements of [max_context + max_extend] int64, i or else the last that the model knows.
        query_positions: elements of the same numbers as float32.
        takes_row_positions: whether packed rows look up their places.
    """

    head_counts: tuple[int, ...]
    num_heads: int
    group: int
    positions: memoryview[int]
    query_positions: memoryview[float]
    takes_row_positions: bool

    @classmethod
    def of(
        cls, shapes: Mapping[str, Sequence[object]], *, num_kv_heads: int, last: int, longest: int
    ) -> PackedGraph | None:
        """From shapes of inputs by name; None where the graph packs no rows.

        Args:
            shapes: axes of unknown size are names.
            num_kv_heads: H of the cache.
            last: greatest position that the model knows.
            longest: tokens of a span at most.
        """
        if ROW_HEADS not in shapes:
            return None
        num_heads = shapes[ROW_HEADS][2]
        assert isinstance(num_heads, int)
        counts = (shape[1] for name, shape in shapes.items() if name.startswith(HEAD_ROWS))
        positions = np.minimum(np.arange(last + 1 + longest, dtype=np.int64), last)
        return cls(
            head_counts=tuple(sorted(count for count in counts if isinstance(count, int))),
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            positions=elements(positions),
            query_positions=float_elements(positions.astype(np.float32)),
            takes_row_positions=ROW_POSITIONS in shapes,
        )

    @property
    def least_tokens(self) -> int:
        """T at least: a head of the cache that a single query reads has another kernel, and other bits."""
        return max(1, MIN_SPAN // self.group)

    @property
    def extra_inputs(self) -> frozenset[str]:
        """Names of inputs beside those of ``model.onnx``."""
        heads = map(head_rows_name, self.head_counts)
        places = {ROW_POSITIONS} if self.takes_row_positions else set()
        return frozenset(
            {POSITIONS, QUERY_POSITIONS, CACHE_COLUMNS, ROW_HEADS, WANTED_HEADS, *heads, *places}
        )


class PackedInputs:
    """Arrays of one call, to be filled again and again.

    Args:
        graph: which will read them.
        shape: of the call.
        capacity: S.
        least_rows: packed rows, and wanted ones, are at least so many: the rest is padding.

    Attributes:
        arrays: by name of the input, int64 where not said otherwise: tokens [1, N], start [B],
            logit_positions [M] among the N, positions [B, T], query_positions [B, 1, G*T, 1] float32,
            cache_columns [S] float32, row_heads [1, N, heads, 3], wanted_heads [1, M, heads, 3],
            each head_rows.h [B, h, T], row_positions [1, N] where the graph takes them.
    """

    def __init__(
        self, graph: PackedGraph, shape: PackedShape, *, capacity: int, least_rows: int
    ) -> None:
        num_rows, width = shape.num_rows, shape.num_tokens
        count = max(shape.all_tokens, least_rows)
        self._graph, self._width, self._is_even = graph, width, shape.is_even
        places = np.zeros((num_rows, 1, graph.group * width, 1), dtype=np.float32)
        self._row_heads = np.zeros((1, count, graph.num_heads, 3), dtype=np.int64)
        heads = np.arange(graph.num_heads)
        self._row_heads[..., 1] = heads // graph.group
        self._group_starts = heads % graph.group * width
        self._rows = np.zeros((num_rows, width), dtype=np.int64)
        self._head_rows = [np.zeros((num_rows, h, width), np.int64) for h in graph.head_counts]
        integers = {
            TOKENS: np.zeros((1, count), dtype=np.int64),
            START: np.zeros(num_rows, dtype=np.int64),
            LOGIT_POSITIONS: np.zeros(max(shape.all_wanted, least_rows), dtype=np.int64),
            POSITIONS: np.zeros((num_rows, width), dtype=np.int64),
        }
        if graph.takes_row_positions:
            integers[ROW_POSITIONS] = np.zeros((1, count), dtype=np.int64)
            self._row_positions = elements(integers[ROW_POSITIONS])
        self._wanted = integers[LOGIT_POSITIONS]
        self._wanted_heads = np.zeros((1, self._wanted.size, graph.num_heads, 3), dtype=np.int64)
        self.arrays: dict[str, IntArray | FloatArray] = {
            **integers,
            QUERY_POSITIONS: places,
            CACHE_COLUMNS: np.arange(capacity, dtype=np.float32),
            ROW_HEADS: self._row_heads,
            WANTED_HEADS: self._wanted_heads,
            **{head_rows_name(rows.shape[1]): rows for rows in self._head_rows},
        }
        self._tokens, self._start = elements(integers[TOKENS]), elements(integers[START])
        self._positions = elements(integers[POSITIONS])
        self._query_positions = float_elements(places)
        self._sizes: list[tuple[int, int]] = []
        if self._is_even:
            self._lay_out([(width, shape.num_wanted)] * num_rows)

    def fill(self, spans: Sequence[Span]) -> None:
        """Write spans of the call's shape."""
        tokens, at, start = self._tokens, 0, self._start
        for row, span in enumerate(spans):
            for token in span.tokens:
                tokens[at] = token
                at += 1
            start[row] = span.start
            self._place(row, span.start)
            if self._graph.takes_row_positions:
                begin, end = at - len(span.tokens), span.start + len(span.tokens)
                self._row_positions[begin:at] = self._graph.positions[span.start : end]
        if not self._is_even:
            sizes = [(len(span.tokens), span.num_logits) for span in spans]
            if sizes != self._sizes:
                self._lay_out(sizes)

    def _place(self, row: int, start: int) -> None:
        width, graph = self._width, self._graph
        end = start + width
        self._positions[row * width : (row + 1) * width] = graph.positions[start:end]
        numbers = graph.query_positions[start:end]
        for at in range(row * graph.group * width, (row + 1) * graph.group * width, width):
            self._query_positions[at : at + width] = numbers

    def _lay_out(self, sizes: list[tuple[int, int]]) -> None:
        """Say where everything stands, of spans of so many tokens and wanted logits each."""
        self._sizes = sizes
        lay_out(np.array(sizes), self._rows, self._row_heads[0], self._group_starts, self._wanted)
        choose(self._wanted, self._row_heads[0], self._wanted_heads[0])
        for head_rows in self._head_rows:
            number_heads(self._rows, head_rows)


def packed_feeds(
    graph: PackedGraph, tokens: IntArray, start: IntArray, *, capacity: int
) -> Mapping[str, IntArray | FloatArray]:
    """Inputs of one call in which all logits are wanted, for who binds none.

    Args:
        graph: to be fed.
        tokens: [B, T] int64.
        start: [B] int64.
        capacity: S.
    """
    num_rows, width = tokens.shape
    at_least = max(width, graph.least_tokens)
    shape = PackedShape(num_rows, at_least, width, tokens.size, tokens.size)
    inputs = PackedInputs(graph, shape, capacity=capacity, least_rows=1)
    rows = enumerate(zip(start.tolist(), tokens.tolist(), strict=True))
    inputs.fill(
        [
            Span(slot=slot, start=first, tokens=tuple(row), num_logits=width)
            for slot, (first, row) in rows
        ]
    )
    return inputs.arrays
