"""The compiled loop that works out the places of a call's rows in what slots keep of recurrent layers.

Source: the arrays are those of ``engines.bundle.states`` and ``engines.onnx.states``.
"""

from __future__ import annotations

from numba import int64, void
from outrider.engines.base import IntArray
from outrider.engines.jit import njit_exact


@njit_exact(int64(int64, int64, int64, int64, int64, int64))
def _window_place(token: int, start: int, first: int, kept: int, window: int, aligned: int) -> int:
    """Return the row of the window's pool that has a token's inputs; 0 before a text's beginning.

    Args:
        token: place in the slot's text.
        start: of the span.
        first: row of the pool with the span's first token.
        kept: row of the pool with the first row of the slot's window.
        window: rows of a window.
        aligned: token behind the last row of the slot's window.
    """
    if token >= start:
        return first + token - start
    column = window - aligned + token
    if token < 0 or column < 0:
        return 0
    return kept + column


@njit_exact(
    void(
        int64[:, ::1], int64, int64, int64, int64, int64, int64, int64[::1], int64[::1],
        int64[::1], int64[::1], int64[::1], int64[::1],
    )
)  # fmt: skip
def lay_out_states(
    spans: IntArray,
    num_rows: int,
    width: int,
    kernel: int,
    max_open: int,
    num_settled: int,
    num_open: int,
    taps: IntArray,
    window_rows: IntArray,
    settled: IntArray,
    opened: IntArray,
    scan_out: IntArray,
    pending_rows: IntArray,
) -> None:
    """Write the places of a call.

    Padding of a row repeats the places of its last token, so that it is as finite as that; a row without tokens shows
    rows of zeros, and keeps what it has.

    Args:
        spans: [at least B, 5] start, tokens, settled ones, and of the slot the tokens of its state and the token behind
            the last row of its window.
        num_rows: B.
        width: T.
        kernel: K.
        max_open: G.
        num_settled: columns of the scan over settled tokens.
        num_open: of the scan behind it; both are 0 of layers without scans, whose places are not written.
        taps: [K * B * T], written.
        window_rows: [B * (K - 1 + G)], written.
        settled: [B * num_settled], written.
        opened: [B * num_open], written.
        scan_out: [B * T], written.
        pending_rows: [B * G], written.
    """
    window = kernel - 1 + max_open
    columns = num_settled + num_open
    all_rows = num_rows * width
    settled[:] = 0
    opened[:] = 0
    pending_rows[:] = 0
    for row in range(num_rows):
        start, count, moved = spans[row, 0], spans[row, 1], spans[row, 2]
        base, aligned = spans[row, 3], spans[row, 4]
        # Of the windows' pool: the span's first token, and the slot's first kept row.
        first, kept = 1 + num_rows * window + row * width, 1 + row * window
        for column in range(width):
            token = start + min(column, count - 1)
            for tap in range(kernel):
                place = 0
                if count:
                    place = _window_place(
                        token - kernel + 1 + tap, start, first, kept, window, aligned
                    )
                taps[tap * all_rows + row * width + column] = place
        for column in range(window):
            window_rows[row * window + column] = _window_place(
                start + count - window + column, start, first, kept, window, aligned
            )
        if not columns:
            continue
        # Of the pending rows' pool.
        first, kept, num_pending = (
            1 + num_rows * max_open + row * width,
            1 + row * max_open,
            start - base,
        )
        at = row * num_settled
        if moved:
            for index in range(num_pending):
                settled[at + index] = kept + index
            for index in range(moved):
                settled[at + num_pending + index] = first + index
        at, before = row * num_open, 0 if moved or not count else num_pending
        for index in range(before):
            opened[at + index] = kept + index
        for index in range(moved, count):
            opened[at + before + index - moved] = first + index
        at, left = row * max_open, 0 if moved else num_pending
        for index in range(left):
            pending_rows[at + index] = kept + index
        for index in range(moved, count):
            pending_rows[at + left + index - moved] = first + index
        for column in range(width):
            index = min(column, max(count - 1, 0))
            place = num_pending + index if index < moved else num_settled + before + index - moved
            scan_out[row * width + column] = row * columns + place if count else row * columns
