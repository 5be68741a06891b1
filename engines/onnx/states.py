"""What slots keep of recurrent layers on the CPU: states, pending rows and windows, and which tokens they are of.

Of a slot two integers say where its arrays stand in its text:

    [0 ... base)  in the state     [base ... length)  open: as pending rows     aligned: behind the window's last row

A span of n tokens from ``start`` on, of which s are settled, reads the P = start - base pending rows that it keeps:

    s > 0    scan 1 over [P pending, s settled], which moves the state     scan 2 over [n - s open] behind it
    s = 0    scan 1 over nothing                                           scan 2 over [P pending, n open]

What scan 2 makes of the state is dropped. So truncation moves no data, plain decoding and prompts replay nothing, and
a verification replays the accepted drafts alone. ``aligned`` is what the slot held when it was last extended or, of a
copy, what its source did.

Invariants:

* M1  ``base <= length <= base + max_open``, and ``length <= aligned``: a window has all that precedes any token from
  ``base`` on.
* M2  Row 0 of each pool is all zeros. It pads scans, where it changes no state (no key, no decay), and stands before a
  text's beginning; so neither windows nor pending rows are ever cleared, and nothing stale is read.
* M3  The state of a slot without ``is_used`` is all zeros, as at a text's beginning. A call that failed leaves it used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from outrider.engines.base import FloatArray, IntArray, Span
from outrider.engines.buffers import int64_view
from outrider.engines.bundle.states import (
    OPEN,
    PENDING_ROWS,
    SCAN_OUT,
    SETTLED,
    TAPS,
    WINDOW_ROWS,
    StatesEntry,
    pending_names,
    place_names,
    state_names,
    window_names,
)
from outrider.engines.kv_cache import zeros
from outrider.engines.onnx.state_loops import lay_out_states
from outrider.engines.spans import cut_to_floors


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Places of the calls of one shape.

    Attributes:
        num_tokens: T.
        columns: of the two scans.
        arrays: flat, in the order of ``lay_out_states``.
    """

    num_tokens: int
    columns: tuple[int, int]
    arrays: tuple[IntArray, ...]


class SlotStates:
    """What the slots of one model keep of its mixers.

    Args:
        entry: sizes.
        num_slots: rows of every array.
    """

    def __init__(self, entry: StatesEntry, num_slots: int) -> None:
        self._entry = entry
        scans = entry.mixers if entry.row else 0
        windows = entry.mixers if entry.channels else 0
        head = (entry.heads, entry.key_size, entry.value_size)
        self._states = zeros((scans, num_slots, *head))
        # What is kept, and what a call writes: by slot, and by row of the call.
        self._pending, self._new_pending = (
            zeros((scans, num_slots, entry.max_open, entry.row)) for _ in range(2)
        )
        self._windows, self._new_windows = (
            zeros((windows, num_slots, entry.window, entry.channels)) for _ in range(2)
        )
        self.bases = [0] * num_slots
        self._aligned = [0] * num_slots
        self._is_used = [False] * num_slots
        self._spans = np.zeros((num_slots, 5), dtype=np.int64)
        self._cells = int64_view(self._spans)

    def columns(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Return the columns of the two scans of a call: at least one together, or none without scans."""
        moved = opened = 0
        if not self._entry.row:
            return 0, 0
        for span in spans:
            count, settled = len(span.tokens), span.num_settled
            num_pending = span.start - self.bases[span.slot] if span.start else 0
            if settled:
                moved = max(moved, num_pending + settled)
                opened = max(opened, count - settled)
            elif count:
                opened = max(opened, num_pending + count)
        return moved, opened if moved else max(1, opened)

    def bind(
        self,
        binding: onnxruntime.IOBinding,
        slot: int,
        num_rows: int,
        num_tokens: int,
        columns: tuple[int, int],
    ) -> StatePlaces:
        """Bind what slots keep, and places for a call of B rows of T tokens, which the caller keeps."""
        entry, all_rows = self._entry, num_rows * num_tokens
        places = {
            TAPS: (entry.kernel, all_rows),
            WINDOW_ROWS: (num_rows, entry.window),
            SETTLED: (num_rows, columns[0]),
            OPEN: (num_rows, columns[1]),
            SCAN_OUT: (all_rows,),
            PENDING_ROWS: (num_rows, entry.max_open),
        }
        arrays = {name: np.zeros(shape, dtype=np.int64) for name, shape in places.items()}
        for name in place_names(entry):
            _bind_input(binding, name, arrays[name])
        for names, kept, new, first in (
            (state_names, self._states, self._states, slot),
            (pending_names, self._pending, self._new_pending, 0),
            (window_names, self._windows, self._new_windows, 0),
        ):
            for name, old, written in zip(names(len(kept)), kept, new, strict=True):
                _bind_input(binding, name, old[slot : slot + num_rows])
                rows = written[first : first + num_rows]
                binding.bind_output(
                    f"new_{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data
                )
        flat = tuple(array.reshape(-1) for array in arrays.values())
        return StatePlaces(num_tokens=num_tokens, columns=columns, arrays=flat)

    def begin(self, spans: Sequence[Span], places: StatePlaces) -> None:
        """Write the places of a call's spans; until ``commit`` nothing of their slots is valid."""
        entry = self._entry
        cells, at = self._cells, 0
        for span in spans:
            slot = span.slot
            base = self.bases[slot] if span.start else 0
            if not span.start and self._is_used[slot]:
                self._states[:, slot] = 0.0
            cells[at] = span.start
            cells[at + 1] = len(span.tokens)
            cells[at + 2] = span.num_settled
            cells[at + 3] = base
            cells[at + 4] = self._aligned[slot]
            at += 5
            self.bases[slot], self._is_used[slot] = 0, True
        lay_out_states(
            self._spans, len(spans), places.num_tokens, entry.kernel, entry.max_open,
            *places.columns, *places.arrays,
        )  # fmt: skip

    def commit(self, spans: Sequence[Span]) -> None:
        """Keep what a call wrote, and note which tokens it is of."""
        first, num_rows = spans[0].slot, len(spans)
        end = first + num_rows
        if any(len(span.tokens) > span.num_settled for span in spans):
            self._pending[:, first:end] = self._new_pending[:, :num_rows]
        self._windows[:, first:end] = self._new_windows[:, :num_rows]
        for row, span in enumerate(spans):
            slot, settled = span.slot, span.num_settled
            base = span.start + settled if settled else self._cells[5 * row + 3]
            self.bases[slot], self._is_used[slot] = base, base > 0
            self._aligned[slot] = span.start + len(span.tokens)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy what one slot keeps over another, whose text then has ``length`` tokens; none for 0."""
        if source == destination and length:
            return
        if length:
            for kept in (self._states, self._pending, self._windows):
                kept[:, destination] = kept[:, source]
            self._aligned[destination] = self._aligned[source]
            self._is_used[destination] = self._is_used[source]
        self.bases[destination] = self.bases[source] if length else 0

    def read(self, slot: int) -> FloatArray:
        """Return [n] float32: a copy of the state, and of what precedes any token behind it, of a slot's base."""
        first = self._entry.window - self._aligned[slot] + self.bases[slot] - self._num_before
        window = self._windows[:, slot, first : first + self._num_before]
        return np.concatenate([self._states[:, slot].reshape(-1), window.reshape(-1)])

    def write(self, slot: int, length: int, values: FloatArray) -> None:
        """Make what ``read`` returned the state of a slot's first ``length`` tokens."""
        state = self._states[:, slot]
        state[...] = values[: state.size].reshape(state.shape)
        window = self._windows[:, slot, self._entry.max_open :]
        window[...] = values[state.size :].reshape(window.shape)
        self.bases[slot] = self._aligned[slot] = length
        self._is_used[slot] = True

    def size(self, _: int) -> int:
        """Return the numbers that ``read`` returns, of a base of however many tokens."""
        channels = len(self._windows) * self._num_before * self._entry.channels
        return int(self._states[:, 0].size) + channels

    @property
    def _num_before(self) -> int:
        """Inputs before a token that its convolution reads."""
        return self._entry.kernel - 1

    def trimmed(self, lengths: Sequence[int | None]) -> list[int | None]:
        """Return the lengths that slots can be cut to, and forget those of which that is nothing."""
        return cut_to_floors(lengths, self.bases)

    def kept_of(self, slot: int) -> FloatArray:
        """Return [n] float32: a copy of all that a slot keeps."""
        kept = (self._states, self._pending, self._windows)
        return np.concatenate([array[:, slot].reshape(-1) for array in kept])


def _bind_input(binding: onnxruntime.IOBinding, name: str, array: FloatArray | IntArray) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
