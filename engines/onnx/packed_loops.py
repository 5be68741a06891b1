"""Compiled loops that work out the places of ragged rows; Python would take as long as a small draft's call.

Source: the arrays are those of ``engines.onnx.packed_inputs``.
"""

from __future__ import annotations

from numba import float32, int64, void
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.jit import njit_exact

_ROWS = int64[:, :, ::1]


@njit_exact(
    void(
        int64[:, ::1], int64, int64, int64, int64, int64, int64, int64[::1], int64[::1], int64[::1],
        int64[::1], int64[::1], float32[::1], _ROWS, _ROWS,
    )
)  # fmt: skip
def lay_out(
    spans: IntArray,
    num_rows: int,
    width: int,
    count: int,
    num_wanted: int,
    group: int,
    last: int,
    tokens: IntArray,
    starts: IntArray,
    wanted: IntArray,
    positions: IntArray,
    row_positions: IntArray,
    query_positions: FloatArray,
    row_heads: IntArray,
    wanted_heads: IntArray,
) -> None:
    """Write a call's inputs but for its tokens; of each array the beginning.

    Args:
        spans: [at least B, 3] tokens, wanted logits and start of each span.
        num_rows: B.
        width: T.
        count: N; what no span fills is padding, as is its token.
        num_wanted: M, likewise.
        group: G, heads of the queries whose rows attention sees as those of one.
        last: greatest position that the model knows.
        tokens: [N], written where there is padding.
        starts: [B], written.
        wanted: [M], written: packed rows.
        positions: [B * T], written.
        row_positions: [N], written.
        query_positions: [B * G * T], written.
        row_heads: [N, heads, 3], written: row of attention, number of the group and row of it.
        wanted_heads: [M, heads, 3], written: those of the wanted rows.
    """
    heads = row_heads.shape[1]
    at = found = 0
    for row in range(num_rows):
        length, num_logits, start = spans[row, 0], spans[row, 1], spans[row, 2]
        starts[row] = start
        for column in range(width):
            position = min(start + column, last)
            positions[row * width + column] = position
            for one in range(group):
                query_positions[(row * group + one) * width + column] = position
        for column in range(length):
            row_positions[at + column] = min(start + column, last)
            for head in range(heads):
                row_heads[at + column, head, 0] = row
                row_heads[at + column, head, 1] = head // group
                row_heads[at + column, head, 2] = head % group * width + column
        at += length
        for number in range(at - num_logits, at):
            wanted[found] = number
            found += 1
    for number in range(at, count):
        tokens[number] = row_positions[number] = 0
        for head in range(heads):
            row_heads[number, head, 0] = 0
            row_heads[number, head, 1] = head // group
            row_heads[number, head, 2] = head % group * width
    for number in range(found, num_wanted):
        wanted[number] = 0
    for number in range(num_wanted):
        wanted_heads[number] = row_heads[wanted[number]]


@njit_exact(void(int64[:, ::1], int64, int64, int64, int64[::1]))
def number_heads(
    spans: IntArray, num_rows: int, width: int, count: int, head_rows: IntArray
) -> None:
    """Write ``head_rows`` [B * h * T]: entry of head j of packed row n among [N*h] is n*h + j.

    Args:
        spans: as for ``lay_out``; padding of a row repeats its last token, a row without shows the first of all.
        num_rows: B.
        width: T.
        count: h.
        head_rows: written.
    """
    at = 0
    for row in range(num_rows):
        length = spans[row, 0]
        for head in range(count):
            first = (row * count + head) * width
            for column in range(width):
                packed = at + min(column, length - 1) if length else 0
                head_rows[first + column] = packed * count + head
        at += length


@njit_exact(void(int64[:, ::1], int64, int64, float32[:, ::1]))
def spread(spans: IntArray, num_rows: int, most: int, logits: FloatArray) -> None:
    """Move each row's logits to its place in a rectangle of ``most`` a row, the last first: none is overwritten before.

    Args:
        spans: as for ``lay_out``.
        num_rows: B.
        most: R.
        logits: [at least B * R, V], rewritten.
    """
    end = 0
    for row in range(num_rows):
        end += spans[row, 1]
    for row in range(num_rows - 1, 0, -1):
        count = spans[row, 1]
        end -= count
        if end == row * most:
            return
        for number in range(count - 1, -1, -1):
            logits[row * most + number] = logits[end + number]
