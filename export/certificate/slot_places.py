"""What a graph with mixers is fed beside tokens: what its slots keep, and the places of a call; slow and clear.

Of a slot two integers say everything (``engines.bundle.states``): ``base``, tokens in its state, and ``end``, tokens
computed. A span starts anywhere in base..end, or at 0 anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import states

_STATE, _PENDING, _WINDOW = "state.", "pending.", "window."


class SlotPlaces:
    """The slots of a graph's rows.

    Args:
        shapes: of the graph's inputs by name.
        batch: rows of a call, each of a slot of its own.
    """

    def __init__(self, shapes: Mapping[str, Sequence[Any]], batch: int) -> None:
        self._kernel = int(shapes[states.TAPS][0]) if states.TAPS in shapes else 1
        self._window = int(shapes[f"{_WINDOW}0"][1]) if states.TAPS in shapes else 0
        self._max_open = int(shapes[f"{_PENDING}0"][1]) if states.SETTLED in shapes else 0
        self._base = np.zeros(batch, np.int64)
        self._end = np.zeros(batch, np.int64)

    def restart(self, start: IntArray, kept: Mapping[str, FloatArray]) -> None:
        """Forget the slots of rows that start at 0, and clear their states among what is kept by name."""
        is_new = start == 0
        self._base[is_new] = self._end[is_new] = 0
        for name, held in kept.items():
            if name.startswith(_STATE):
                held[is_new] = 0.0

    def feeds(self, start: IntArray, num_tokens: int, settled: IntArray) -> dict[str, IntArray]:
        """Return the places of spans of one length, whose first ``settled`` [B] tokens stay; and note the spans."""
        assert ((self._base <= start) & (start <= self._end)).all(), "tokens that were settled"
        found = self._window_places(start, num_tokens) if self._window else {}
        if self._max_open:
            found |= self._scan_places(start, num_tokens, settled)
        self._base = np.where(settled > 0, start + settled, self._base)
        self._end = start + num_tokens
        return found

    def _window_places(self, start: IntArray, num_tokens: int) -> dict[str, IntArray]:
        batch, window = len(start), self._window
        rows = np.arange(batch)[:, None]

        def places(tokens: IntArray) -> IntArray:
            """Return rows of the pool of tokens [B, n], by their numbers in the text."""
            column = window - self._end[:, None] + tokens
            held = np.where((tokens < 0) | (column < 0), 0, 1 + rows * window + column)
            new = 1 + batch * window + rows * num_tokens + tokens - start[:, None]
            return np.where(tokens < start[:, None], held, new)

        columns = start[:, None] + np.arange(num_tokens)
        taps = [places(columns + 1 - self._kernel + tap).reshape(-1) for tap in range(self._kernel)]
        last = start[:, None] + num_tokens - window + np.arange(window)
        return {states.TAPS: np.stack(taps), states.WINDOW_ROWS: places(last)}

    def _scan_places(
        self, start: IntArray, num_tokens: int, settled: IntArray
    ) -> dict[str, IntArray]:
        batch, most = len(start), self._max_open
        moves, behind, left = [], [], []
        for row, (begin, count) in enumerate(zip(start.tolist(), settled.tolist(), strict=True)):
            held = [1 + row * most + index for index in range(begin - int(self._base[row]))]
            new = [1 + batch * most + row * num_tokens + index for index in range(num_tokens)]
            moves.append(held + new[:count] if count else [])
            behind.append(new[count:] if count else held + new)
            left.append(behind[-1])
            assert len(behind[-1]) <= most, "more open tokens than are kept"
        widths = [max(map(len, rows)) for rows in (moves, behind)]
        answers = np.zeros((batch, num_tokens), np.int64)
        for row, count in enumerate(settled.tolist()):
            first = row * sum(widths)
            answers[row, :count] = first + len(moves[row]) - count + np.arange(count)
            num_open = num_tokens - count
            begin = first + widths[0] + len(behind[row]) - num_open
            answers[row, count:] = begin + np.arange(num_open)
        return {
            states.SETTLED: _padded(moves, widths[0]),
            states.OPEN: _padded(behind, widths[1]),
            states.SCAN_OUT: answers.reshape(-1),
            states.PENDING_ROWS: _padded(left, most),
        }


def is_kept(name: str) -> bool:
    """Return whether a graph's input is what slots keep of mixers."""
    return name.startswith((_STATE, _PENDING, _WINDOW))


def has_mixers(shapes: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a graph of these inputs has mixers."""
    return any(map(is_kept, shapes))


def is_state(name: str) -> bool:
    """Return whether a graph's input is the state of a mixer."""
    return name.startswith(_STATE)


def _padded(rows: Sequence[Sequence[int]], width: int) -> IntArray:
    """Return rows [B, width] int64; behind each stands the pool's row of zeros."""
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64).reshape(
        len(rows), width
    )
