"""Keys and values of all slots, in memory that graphs read and write in place.

Two buffers per layer, keys and values, each [max_batch, H, S, D] float32 and contiguous, so that
the rows of any range of slots are one piece of memory too; all of them of one H and D lie in one array, since what
is done to a slot is done to all its layers at once:

    slots     [0 ........ a ............ b ........ max_batch)
    bound            [a's row ... b-1's row)

and of one slot and head, by token position:

    [0 ... start) valid   [start ... start + T) written by this extend   [start + T ... S) zero

S is one of a few capacities (attention reads all S positions, valid or not), and grows and
shrinks by copying. What decoder layers attend to of a source is kept in a cache of its own, with capacities of its own.

A layer that sees a window alone may keep a *ring*: at most C columns, token p in column p mod C. Below C columns, S of
them, it is a row like others; a token has the same column then, so growing moves none. What a ring has overwritten
is known to whoever chooses C (``engines.onnx.rings``).

Invariants:

* K1  S >= max(start) + T in every extend, so that no write lands outside the row.
* K2  Nothing but zeros lies beyond what the last extend of a slot wrote: a masked position has
  probability 0, but 0 times NaN or infinity is NaN, so garbage there would not stay unread. A ring's columns are of
  the last C tokens written, or zeros.

Knows neither a model nor a library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from outrider.engines.base import EngineError, EngineLimits, FloatArray

# Attention reads the whole capacity: 7.4 ms a step at 128 tokens, 14.8 ms at 2048 (6 layers, 768
# wide), so capacities start low and grow in steps. Two steps to a doubling leave a seventh of what is read empty
# instead of a quarter, for one copy more: a call of eight rows of a token takes a tenth less at 192 than at 256
# (10M parameters).
FIRST_CAPACITY = 128
# Sources are short where sentences are translated.
_FIRST_SOURCE_CAPACITY = 64
# Buffers shrink only where the longest slot could double before they would have to grow again.
GROWTH_ROOM = 2
# Requests of one kind come again: a cache that fits them is not made smaller between two, which would cost a short
# request 3 % of its time, until so many have left it roomy, or it is far too large.
PATIENCE = 4
_FAR_TOO_LARGE = 8
# No call has fewer columns over all its rows, and no row of an older bundle: a product of one row takes
# another matrix kernel, with other bits (I2 of engines.base).
MIN_SPAN = 2


def zeros(shape: tuple[int, ...]) -> FloatArray:
    """Zeroed memory of the host."""
    return np.zeros(shape, dtype=np.float32)


def capacities(limits: EngineLimits) -> tuple[int, ...]:
    """Capacities S a cache of the host may take, ascending: those of ``coarse_capacities`` and halfway between."""
    return _with_halves(coarse_capacities(limits))


def source_capacities(limits: EngineLimits) -> tuple[int, ...]:
    """Capacities that the host's cache of sources may take, ascending; the last holds every source allowed."""
    return _with_halves(_doublings(_FIRST_SOURCE_CAPACITY, max(MIN_SPAN, limits.max_source)))


def coarse_capacities(limits: EngineLimits) -> tuple[int, ...]:
    """Capacities for who builds something for each, ascending; the last holds every extend the limits allow.

    A span that starts at the last valid token is still padded to the longest of its batch, hence
    ``max_context + max_extend``.
    """
    return _doublings(FIRST_CAPACITY, limits.max_context + max(MIN_SPAN, limits.max_extend))


def _doublings(first: int, largest: int) -> tuple[int, ...]:
    sizes = []
    capacity = first
    while capacity < largest:
        sizes.append(capacity)
        capacity *= 2
    return (*sizes, largest)


def _with_halves(sizes: tuple[int, ...]) -> tuple[int, ...]:
    halfway = (size + size // 2 for size in sizes)
    return tuple(sorted({*sizes, *(size for size in halfway if size < sizes[-1])}))


CacheRows = Sequence[tuple[tuple[int, ...], int]]
"""Shape and address of the rows of consecutive slots, by buffer."""


class KvCache:
    """Buffers of one model's slots, and how many tokens of each slot are valid.

    Args:
        heads: H and D of each of the L layers.
        rings: of each layer C, the most columns, or 0 where it keeps the whole text; empty where all do.
        num_slots: rows of every buffer.
        capacities: that S may take, ascending.
        growth_room: how often the longest slot must fit before memory is made smaller; ``GROWTH_ROOM`` where slots
            grow, 1 where they do not.
    """

    def __init__(
        self,
        *,
        heads: Sequence[tuple[int, int]],
        num_slots: int,
        capacities: Sequence[int],
        growth_room: int = GROWTH_ROOM,
        rings: Sequence[int] = (),
    ) -> None:
        self.lengths = [0] * num_slots
        sizes = [(*one, ring) for one, ring in zip(heads, rings or [0] * len(heads), strict=True)]
        # Of each layer: its sizes, and its place among the layers of these sizes.
        self._layers = [(one, sizes[:layer].count(one)) for layer, one in enumerate(sizes)]
        self._counts = Counter(sizes)
        self._allocate = zeros
        self._capacities = capacities
        self._growth_room = growth_room
        self._written = [0] * num_slots
        self._num_roomy = 0
        # S, tokens a slot has room for at present.
        self.capacity = self._capacities[0]
        # Of the layers of one H, D and C: [2 layers, max_batch, H, S, D], key, value, key, value ...
        self._groups = self._allocated(self.capacity)
        # Of one token's keys and values, as ``read`` returns them.
        self.token_shape = self.read(0, 1).shape

    @property
    def rings(self) -> list[FloatArray]:
        """[2 L, max_batch, H, S, D] of the layers with a ring, those of one H and D together."""
        return [held for (_, _, ring), held in self._groups.items() if ring]

    @property
    def _whole(self) -> list[FloatArray]:
        return [held for (_, _, ring), held in self._groups.items() if not ring]

    def rows(self, slot: int, num_slots: int) -> CacheRows:
        """[2 L] shapes [num_slots, H, S, D] and addresses of consecutive slots: key.0, value.0, key.1, value.1 ..."""
        groups = {
            sizes: ((num_slots, *held.shape[2:]), held.ctypes.data + slot * held.strides[1], held)
            for sizes, held in self._groups.items()
        }
        found: list[tuple[tuple[int, ...], int]] = []
        for sizes, place in self._layers:
            shape, first, held = groups[sizes]
            step = held.strides[0]
            found += [(shape, first + 2 * place * step), (shape, first + (2 * place + 1) * step)]
        return found

    def capacity_for(self, num_tokens: int) -> int:
        """The smallest capacity that holds so many; the present one where none does."""
        return next((size for size in self._capacities if size >= num_tokens), self.capacity)

    def reserve(self, num_tokens: int) -> bool:
        """Make S at least ``num_tokens``; True if the memory was replaced.

        For a moment old and new stand side by side, and if they cannot, nothing has changed.

        Raises:
            ValueError: more than the limits allow.
            EngineError: more memory could not be had; what is cached stays valid.
        """
        if num_tokens <= self.capacity:
            return False
        if num_tokens > self._capacities[-1]:
            raise ValueError(f"{num_tokens} tokens, the largest capacity is {self._capacities[-1]}")
        self._move_to(next(size for size in self._capacities if size >= num_tokens), self._written)
        return True

    def trim(self, lengths: Sequence[int | None]) -> bool:
        """Forget all but the first ``lengths[s]`` tokens of each slot s, and whole slots beyond.

        Less memory replaces this where every slot could double in it, and it either is far
        less or would have done for a while; only the tokens kept are copied.

        Returns:
            Whether the memory was replaced.

        Raises:
            EngineError: the smaller memory could not be had; what was kept stays valid.
        """
        longest = max(self.lengths)
        kept = [min(held, length or 0) for held, length in zip(self.lengths, lengths, strict=False)]
        self.lengths[:] = (*kept, *[0] * (len(self.lengths) - len(kept)))
        capacity = self.capacity_for(self._growth_room * max(kept, default=0))
        lasting = max(capacity, self.capacity_for(longest))
        self._num_roomy = self._num_roomy + 1 if lasting < self.capacity else 0
        if capacity * _FAR_TOO_LARGE > self.capacity:
            if self._num_roomy < PATIENCE:
                return False
            capacity = lasting
        for slot, length in enumerate(self.lengths):
            # A ring is copied whole.
            self._clear(self.rings, slot, length, self._written[slot])
        self._move_to(capacity, kept)
        self._written = list(self.lengths)
        return True

    def reset(self) -> bool:
        """Forget all slots, and take the first capacity; whether the memory was replaced.

        Raises:
            EngineError: the smaller memory could not be had.
        """
        self.lengths[:] = [0] * len(self.lengths)
        if self.capacity == self._capacities[0]:
            return False
        self._move_to(self._capacities[0], self.lengths)
        self._written = list(self.lengths)
        return True

    def begin_write(self, slot: int, start: int, num_tokens: int) -> None:
        """Restore K2 for an extend about to write ``[start, start + num_tokens)`` of a slot.

        Nothing of the slot is valid until the caller says what has become of it (``lengths``).
        """
        self.lengths[slot] = 0
        end = start + num_tokens
        if end < self._written[slot]:
            self._clear(self._groups.values(), slot, end, self._written[slot])
        self._written[slot] = end

    def read(self, slot: int, end: int, start: int = 0) -> FloatArray:
        """[2 L, H, n, D] float32: a copy of what a slot holds of n tokens; [n, F] where H and D differ by layer.

        Layers with a ring are left out.
        """
        parts = [values[:, slot, :, start:end] for values in self._whole]
        if len(parts) == 1:
            return parts[0].copy()
        none = np.empty((end - start, 0), np.float32)
        flat = (
            part.transpose(2, 0, 1, 3).reshape(
                end - start, math.prod(part.shape[:2]) * part.shape[3]
            )
            for part in parts
        )
        return np.concatenate([none, *flat], axis=1)

    def layer(self, layer: int, slot: int, start: int, end: int) -> FloatArray:
        """[2, H, end - start, D] float32: keys and values of one layer of a slot, where they are."""
        sizes, place = self._layers[layer]
        return self._groups[sizes][2 * place : 2 * place + 2, slot, :, start:end]

    def write(self, slot: int, start: int, values: FloatArray) -> None:
        """Put n tokens, as ``read`` returns them, behind the first ``start`` of a slot, which end it; S has room."""
        count, begin = values.shape[-2], 0
        self.begin_write(slot, start, count)
        whole = self._whole
        for held in whole:
            part = held[:, slot, :, start : start + count]
            if len(whole) == 1:
                part[...] = values
                continue
            first, heads, _, size = part.shape
            end = begin + first * heads * size
            flat = values[:, begin:end].reshape(count, first, heads, size)
            part[...] = flat.transpose(1, 2, 0, 3)
            begin = end
        self.lengths[slot] = start + count

    def clear(self, slot: int) -> None:
        """Forget all of a slot, and what was written of it."""
        self.begin_write(slot, 0, 0)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot over another."""
        if source != destination:
            self.begin_write(destination, length, 0)
            for values in self._groups.values():
                for columns in columns_of(0, length, values.shape[3]):
                    values[:, destination, :, columns] = values[:, source, :, columns]
            # A ring was copied whole, with what stands behind the tokens.
            self._clear(self.rings, destination, length, self._written[source])
        self.lengths[destination] = length

    def copy(self, other: KvCache, source: int, destination: int, start: int, end: int) -> None:
        """Copy columns start..end of a slot of a cache of the same layers, none with a ring, over those of a slot."""
        for sizes, values in self._groups.items():
            values[:, destination, :, start:end] = other._groups[sizes][:, source, :, start:end]

    def _move_to(self, capacity: int, num_copied: Sequence[int]) -> None:
        """Copy the first ``num_copied[s]`` tokens of each slot s to memory of another capacity."""
        try:
            groups = self._allocated(capacity)
        except MemoryError as error:
            raise EngineError(f"no memory for a cache of {capacity} tokens") from error
        for sizes, values in groups.items():
            old = self._groups[sizes]
            for slot, length in enumerate(num_copied):
                for columns in columns_of(0, length, old.shape[3]):
                    values[:, slot, :, columns] = old[:, slot, :, columns]
        self.capacity, self._groups, self._num_roomy = capacity, groups, 0

    def _clear(self, groups: Iterable[FloatArray], slot: int, start: int, end: int) -> None:
        """Write zeros over what some layers hold of tokens start..end of a slot."""
        for values in groups:
            for columns in columns_of(start, end, values.shape[3]):
                values[:, slot, :, columns] = 0.0

    def _allocated(self, capacity: int) -> dict[tuple[int, int, int], FloatArray]:
        """Return zeroed memory for each H, D and C that layers have."""
        num_slots = len(self.lengths)
        return {
            (heads, size, ring): self._allocate(
                (2 * count, num_slots, heads, min(capacity, ring or capacity), size)
            )
            for (heads, size, ring), count in self._counts.items()
        }


def columns_of(start: int, end: int, size: int) -> tuple[slice, ...]:
    """Return where tokens start..end stand in ``size`` columns, token p in column p mod ``size``, in order."""
    if end - start >= size:
        return (slice(0, size),)
    first, last = start % size, end % size
    return (slice(first, last),) if first <= last else (slice(first, size), slice(0, last))
