"""Keys and values of all slots, in buffers that graphs read and write in place.

One buffer per layer for keys and one for values, [max_batch, H, S, D] float32, contiguous, so that
the rows of any range of slots are one piece of memory too:

    slots     [0 ........ a ............ b ........ max_batch)
    bound            [a's row ... b-1's row)

and of one slot and head, by token position:

    [0 ... start) valid   [start ... start + T) written by this extend   [start + T ... S) zero

S is one of a few capacities (attention reads all S positions, valid or not), and grows and
shrinks by copying.

Invariants:

* K1  S >= max(start) + T in every extend, so that no write lands outside the row.
* K2  Nothing but zeros lies beyond what the last extend of a slot wrote: a masked position has
  probability 0, but 0 times NaN or infinity is NaN, so garbage there would not stay unread.

Knows neither a model nor a library: memory comes from an ``Allocator``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from engines.base import EngineError, EngineLimits, FloatArray

# Attention reads the whole capacity: 7.4 ms a step at 128 tokens, 14.8 ms at 2048 (6 layers, 768
# wide), so capacities start low and double.
FIRST_CAPACITY = 128
# Buffers shrink only where the longest slot could double before they would have to grow again.
GROWTH_ROOM = 2
# Requests of one kind come again: a cache that fits them is not made smaller between two, which would cost a short
# request 3 % of its time, until so many have left it roomy, or it is far too large.
_PATIENCE = 4
_FAR_TOO_LARGE = 8
# No call has fewer columns over all its rows, and no row of an older bundle: a product of one row takes
# another matrix kernel, with other bits (I2 of engines.base).
MIN_SPAN = 2


class Buffer(Protocol):
    """A contiguous float32 array on some device."""

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        ...

    def read(self) -> FloatArray:
        """The array on the host; a view where the host is the device."""
        ...

    def write(self, values: FloatArray) -> None:
        """Replace the content; free of charge for a view just changed."""
        ...


Allocator = Callable[[tuple[int, ...]], Buffer]


class HostBuffer:
    """Zeroed memory of the host."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._values: FloatArray = np.zeros(shape, dtype=np.float32)
        self.pointer = self._values.ctypes.data

    def read(self) -> FloatArray:
        """The array itself."""
        return self._values

    def write(self, values: FloatArray) -> None:
        """Copy values in, unless they are this buffer."""
        if values is not self._values:
            self._values[...] = values


def capacities(limits: EngineLimits) -> tuple[int, ...]:
    """Capacities S a cache may take, ascending; the last holds every extend the limits allow.

    A span that starts at the last valid token is still padded to the longest of its batch, hence
    ``max_context + max_extend``.
    """
    largest = limits.max_context + max(MIN_SPAN, limits.max_extend)
    sizes = []
    capacity = FIRST_CAPACITY
    while capacity < largest:
        sizes.append(capacity)
        capacity *= 2
    return (*sizes, largest)


class KvCache:
    """Buffers of one model's slots, and how many tokens of each slot are valid.

    Args:
        num_layers: L.
        num_kv_heads: H.
        head_size: D.
        limits: of the engine.
        allocate: gives a zeroed buffer of a shape.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        limits: EngineLimits,
        allocate: Allocator = HostBuffer,
    ) -> None:
        self.lengths = [0] * limits.max_batch
        self._num_buffers = 2 * num_layers
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._allocate = allocate
        self._capacities = capacities(limits)
        self._written = [0] * limits.max_batch
        self._num_roomy = 0
        self._capacity = self._capacities[0]
        self._buffers = [allocate(self._shape(self._capacity)) for _ in range(self._num_buffers)]

    @property
    def capacity(self) -> int:
        """S, tokens a slot has room for at present."""
        return self._capacity

    def slots_shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """Shape of the rows of ``num_slots`` consecutive slots."""
        return (num_slots, self._num_kv_heads, self._capacity, self._head_size)

    def pointers(self, slot: int) -> list[int]:
        """[2 L] addresses of a slot's row: key.0, value.0, key.1, value.1 ..."""
        row_bytes = 4 * self._num_kv_heads * self._capacity * self._head_size
        return [buffer.pointer + slot * row_bytes for buffer in self._buffers]

    def reserve(self, num_tokens: int) -> bool:
        """Make S at least ``num_tokens``; True if the buffers were replaced.

        All new buffers are there, and filled, before the first is replaced: for a moment old and
        new stand side by side, and if they cannot, nothing has changed.

        Raises:
            ValueError: more than the limits allow.
            EngineError: larger buffers could not be had; what is cached stays valid.
        """
        if num_tokens <= self._capacity:
            return False
        if num_tokens > self._capacities[-1]:
            raise ValueError(f"{num_tokens} tokens, the largest capacity is {self._capacities[-1]}")
        self._move_to(next(size for size in self._capacities if size >= num_tokens), self._written)
        return True

    def trim(self, lengths: Sequence[int]) -> bool:
        """Forget all but the first ``lengths[s]`` tokens of each slot s, and whole slots beyond.

        Smaller buffers replace these where every slot could double in them, and they either are far
        smaller or would have done for a while; only the tokens kept are copied.

        Returns:
            Whether the buffers were replaced.

        Raises:
            EngineError: smaller buffers could not be had; what was kept stays valid.
        """
        longest = max(self.lengths)
        kept = [min(held, length) for held, length in zip(self.lengths, lengths, strict=False)]
        self.lengths[:] = (*kept, *[0] * (len(self.lengths) - len(kept)))
        capacity = self._capacity_for(GROWTH_ROOM * max(kept, default=0))
        lasting = max(capacity, self._capacity_for(longest))
        self._num_roomy = self._num_roomy + 1 if lasting < self._capacity else 0
        if capacity * _FAR_TOO_LARGE > self._capacity:
            if self._num_roomy < _PATIENCE:
                return False
            capacity = lasting
        self._move_to(capacity, kept)
        self._written = list(self.lengths)
        return True

    def begin_write(self, slot: int, start: int, num_tokens: int) -> None:
        """Restore K2 for an extend about to write ``[start, start + num_tokens)`` of a slot."""
        end = start + num_tokens
        if end < self._written[slot]:
            for buffer in self._buffers:
                values = buffer.read()
                values[slot, :, end : self._written[slot]] = 0.0
                buffer.write(values)
        self._written[slot] = end

    def read(self, slot: int, num_tokens: int) -> FloatArray:
        """[2 L, H, num_tokens, D] float32: a copy of what a slot holds first."""
        return np.stack([buffer.read()[slot, :, :num_tokens] for buffer in self._buffers])

    def clear(self, slot: int) -> None:
        """Forget all of a slot, and what was written of it."""
        self.begin_write(slot, 0, 0)
        self.lengths[slot] = 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot over another."""
        end = max(length, self._written[destination])
        if source != destination:
            for buffer in self._buffers:
                values = buffer.read()
                values[destination, :, :length] = values[source, :, :length]
                values[destination, :, length:end] = 0.0
                buffer.write(values)
            self._written[destination] = length
        self.lengths[destination] = length

    def _capacity_for(self, num_tokens: int) -> int:
        """The smallest capacity that holds so many; the present one where none does."""
        return next((size for size in self._capacities if size >= num_tokens), self._capacity)

    def _move_to(self, capacity: int, num_copied: Sequence[int]) -> None:
        """Copy the first ``num_copied[s]`` tokens of each slot s to buffers of another capacity."""
        shape = self._shape(capacity)
        try:
            buffers = [self._allocate(shape) for _ in range(self._num_buffers)]
        except MemoryError as error:
            raise EngineError(f"no memory for a cache of {capacity} tokens") from error
        for old, new in zip(self._buffers, buffers, strict=True):
            values, old_values = new.read(), old.read()
            for slot, length in enumerate(num_copied):
                values[slot, :, :length] = old_values[slot, :, :length]
            new.write(values)
        self._capacity, self._buffers, self._num_roomy = capacity, buffers, 0

    def _shape(self, capacity: int) -> tuple[int, int, int, int]:
        return (len(self.lengths), self._num_kv_heads, capacity, self._head_size)


def cache_names(
    num_layers: int, key_name: Callable[[int], str], value_name: Callable[[int], str]
) -> list[str]:
    """Tensor names in the order of ``KvCache.pointers``."""
    return list(
        chain.from_iterable((key_name(layer), value_name(layer)) for layer in range(num_layers))
    )
