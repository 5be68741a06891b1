"""Where the rows of ragged spans stand, worked out in compiled loops: 23 us in numpy, which a small draft's call feels.

Source: the arrays are those of ``engines.packed_inputs``.
"""

from __future__ import annotations

from numba import int64, void

from engines.base import IntArray
from engines.compiled import rule


@rule(void(int64[:, ::1], int64[:, ::1], int64[:, :, ::1], int64[::1], int64[::1]))
def lay_out(
    sizes: IntArray, rows: IntArray, answers: IntArray, group_starts: IntArray, wanted: IntArray
) -> None:
    """Write where each span's tokens and wanted logits stand.

    Args:
        sizes: [B, 2] tokens and wanted logits of each span.
        rows: [B, T], written: packed row of each place, of padding that of the row's last token, 0 in a row without.
        answers: [N, heads, 3], written but for the middle: row of attention and row of its group's head.
        group_starts: [heads], first row of each head in its group.
        wanted: [at least all wanted], written: packed rows.
    """
    at = num_wanted = 0
    for row in range(sizes.shape[0]):
        length, num_logits = sizes[row, 0], sizes[row, 1]
        for column in range(rows.shape[1]):
            rows[row, column] = at + min(column, length - 1) if length else 0
        for column in range(length):
            for head in range(answers.shape[1]):
                answers[at + column, head, 0] = row
                answers[at + column, head, 2] = group_starts[head] + column
        at += length
        for number in range(at - num_logits, at):
            wanted[num_wanted] = number
            num_wanted += 1


@rule(void(int64[:, ::1], int64[:, :, ::1]))
def number_heads(rows: IntArray, head_rows: IntArray) -> None:
    """Write ``head_rows`` [B, h, T]: entry of head j of packed row n among [N*h] is n*h + j, of ``rows`` [B, T]."""
    count = head_rows.shape[1]
    for row in range(rows.shape[0]):
        for head in range(count):
            for column in range(rows.shape[1]):
                head_rows[row, head, column] = rows[row, column] * count + head


@rule(void(int64[::1], int64[:, :, ::1], int64[:, :, ::1]))
def choose(wanted: IntArray, answers: IntArray, chosen: IntArray) -> None:
    """Write ``chosen`` [M, heads, 3]: of ``answers`` [N, heads, 3] the rows ``wanted`` [M]."""
    for number in range(wanted.size):
        chosen[number] = answers[wanted[number]]
