"""What a bundle says of layers that keep a recurrent state, or a window of a convolution's inputs, of each slot.

Such a layer, a *mixer*, has for each slot the state of its *settled* text and, of the tokens behind it, which may still
be rejected, what its scan reads of them: the *pending* rows (``engines.onnx.states``). ``model.onnx`` takes and gives,
by number of the mixer:

    state.i    new_state.i    [batch, heads, key_size, value_size]          bound to the same memory
    pending.i  new_pending.i  [batch, max_open, row]
    window.i   new_window.i   [batch, kernel - 1 + max_open, channels]      channels last

and the places of a call, below. Of mixers without a scan, ``row`` is 0 and there are windows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from outrider.engines.bundle.fields import Count, Size

_FLOAT32_BYTES = 4
STATES = "states"
"""What a bundle requires of its server where a model has states."""

# Inputs of a call of R = batch * tokens new rows, int64. A place counts rows of a pool: one of zeros, then those that
# the slots keep, then the new ones.
# [kernel, R]: of the window's pool, for each tap of each new row.
TAPS = "taps"
# [batch, kernel - 1 + max_open]: of the window's pool, what windows keep.
WINDOW_ROWS = "window_rows"
# [batch, settled] and [batch, open]: of the pending rows' pool, what the two scans read; either axis may be 0.
SETTLED = "settled"
OPEN = "open"
# [R]: of the scans' answers [batch * (settled + open)], the one of each new row.
SCAN_OUT = "scan_out"
# [batch, max_open]: of the pending rows' pool, what is kept.
PENDING_ROWS = "pending_rows"
WINDOW_PLACES = (TAPS, WINDOW_ROWS)
SCAN_PLACES = (SETTLED, OPEN, SCAN_OUT, PENDING_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesEntry:
    """The mixers of one model of a bundle, all of these sizes.

    Attributes:
        mixers: how many.
        kernel: taps K of their convolutions; 1 where they have none.
        channels: of the convolutions; 0 where they have none.
        row: numbers that the scan reads of a token: queries, keys, values, decay, and beta where there is one; 0
            without a scan, as are the three sizes of the state.
        heads: of the state.
        key_size: of the state.
        value_size: of the state.
        max_open: tokens behind the settled text that may be rejected.
    """

    mixers: Count
    kernel: Count
    channels: Size
    row: Size
    heads: Size
    key_size: Size
    value_size: Size
    max_open: Count

    @property
    def window(self) -> int:
        """Rows of a window: what precedes any token that may come next."""
        return self.kernel - 1 + self.max_open

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot takes, however long its text; windows and pending rows twice: a call writes them apart."""
        state = self.heads * self.key_size * self.value_size
        written = self.max_open * self.row + self.window * self.channels
        return _FLOAT32_BYTES * self.mixers * (state + 2 * written)


@cache
def state_names(num_mixers: int) -> tuple[str, ...]:
    """Return the inputs of states by mixer."""
    return tuple(f"state.{index}" for index in range(num_mixers))


@cache
def pending_names(num_mixers: int) -> tuple[str, ...]:
    """Return the inputs of pending rows by mixer."""
    return tuple(f"pending.{index}" for index in range(num_mixers))


@cache
def window_names(num_mixers: int) -> tuple[str, ...]:
    """Return the inputs of windows by mixer."""
    return tuple(f"window.{index}" for index in range(num_mixers))


def kept_names(entry: StatesEntry) -> tuple[str, ...]:
    """Return the inputs of all that slots keep of mixers; outputs are the same behind ``new_``."""
    scans = entry.mixers if entry.row else 0
    windows = entry.mixers if entry.channels else 0
    return state_names(scans) + pending_names(scans) + window_names(windows)


def place_names(entry: StatesEntry) -> tuple[str, ...]:
    """Return the inputs of a call's places."""
    return (WINDOW_PLACES if entry.channels else ()) + (SCAN_PLACES if entry.row else ())
