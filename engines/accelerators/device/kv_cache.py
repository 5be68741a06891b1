"""Keys and values of all slots in a device's memory, for graphs that write them in place.

Layout and invariants are those of ``engines.kv_cache``; elements have two or four bytes, nothing is
ever copied over the host, and what must be cleared or moved is enqueued on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.accelerators.device.base import ALIGNMENT, PlanDevice, Rows
from outrider.engines.base import EngineError


class PlanCache:
    """Buffers of one model's slots, of texts or of sources, and how many tokens of each slot are valid or written.

    ``pasts`` are graphs' inputs of them, layer by layer: keys, then values. ``presents`` are the outputs.
    Where ``reads_lengths``, nothing reads beyond a row's length. So K2 need not hold, and only a new text clears what
    the last one left behind: behind each rejection that would be two memsets a layer and row. Nor does a larger cache
    take longer, so that it need not shrink, which would end all recordings of its addresses.
    """

    def __init__(
        self,
        device: PlanDevice,
        pasts: Sequence[str],
        presents: Sequence[str],
        *,
        num_heads: int,
        head_size: int,
        max_batch: int,
        item_bytes: int,
        capacity: int,
        reads_lengths: bool = False,
    ) -> None:
        self.reads_lengths = reads_lengths
        self.lengths = [0] * max_batch
        self.capacity = capacity
        self._device = device
        self._num_heads = num_heads
        self._token_bytes = head_size * item_bytes
        self._written = [0] * max_batch
        size = self._buffer_bytes(capacity)
        # Key and value of layer 0, of layer 1, ...
        self._buffers = [device.allocate(size) for _ in pasts]
        self._pasts, self._presents = tuple(pasts), tuple(presents)

    def pointers(self, slot: int) -> list[int]:
        """[2 L] addresses of a slot's row: key.0, value.0, key.1, value.1 ...

        Raises:
            EngineError: a resize lost the memory.
        """
        self._require_buffers()
        offset = slot * self._row_bytes(self.capacity)
        assert offset % ALIGNMENT == 0
        return [buffer + offset for buffer in self._buffers]

    def addresses(self, slot: int) -> dict[str, int]:
        """Return where each cache tensor of a graph begins for rows from a slot on; past and present are one."""
        names = self._pasts + self._presents
        return dict(zip(names, 2 * self.pointers(slot), strict=True))

    def past_addresses(self, slot: int) -> dict[str, int]:
        """Return the same of a graph that writes nothing."""
        return dict(zip(self._pasts, self.pointers(slot), strict=True))

    def resize(self, capacity: int) -> None:
        """Move all slots into buffers of another capacity, one by one; what has no room there is forgotten.

        Two old buffers at most lie beside the new ones of what was moved, so old and new caches need not fit
        together. If a buffer cannot be had, what was moved moves back, and nothing has changed but addresses: the
        last old buffer is still there, and each larger one that is given back makes room for the one before.

        Raises:
            EngineError: a buffer cannot be had, or an earlier resize lost the memory.
        """
        self._require_buffers()
        spare: list[int] = []
        num_moved = 0
        try:
            for old in list(self._buffers):
                self._buffers[num_moved] = self._copied(old, self.capacity, capacity)
                num_moved += 1
                self._free(spare)
                spare = [old]
        except Exception:
            self._move_back(num_moved, spare, capacity)
            raise
        self._free(spare)
        self.capacity = capacity
        self._written = [min(end, capacity) for end in self._written]

    def _move_back(self, num_moved: int, spare: list[int], capacity: int) -> None:
        """Undo the first moves to buffers of a capacity; ``spare`` is the last that was replaced."""
        try:
            for at in reversed(range(num_moved)):
                new = self._buffers[at]
                old = spare.pop() if spare else self._copied(new, capacity, self.capacity)
                self._buffers[at] = old
                self._device.free(new)
        except Exception:
            self.free()  # buffers of two capacities would answer wrongly; without any, every call fails
            raise

    def _copied(self, buffer: int, capacity: int, new_capacity: int) -> int:
        """Return a new buffer of another capacity with what one holds, as far as it has room."""
        old_pitch, new_pitch = capacity * self._token_bytes, new_capacity * self._token_bytes
        new = self._device.allocate(self._buffer_bytes(new_capacity))
        try:
            self._device.copy_rows(
                Rows(new, new_pitch),
                Rows(buffer, old_pitch),
                width=min(old_pitch, new_pitch),
                rows=len(self.lengths) * self._num_heads,
            )
        except Exception:
            self._device.free(new)
            raise
        return new

    def trim(self, lengths: Sequence[int | None]) -> int:
        """Forget all but the first ``lengths[s]`` tokens of each slot s, and whole slots beyond.

        Returns:
            Tokens of the longest slot.
        """
        kept = [min(held, length or 0) for held, length in zip(self.lengths, lengths, strict=False)]
        self.lengths[:] = (*kept, *[0] * (len(self.lengths) - len(kept)))
        return max(kept, default=0)

    def begin_write(self, slot: int, start: int, num_tokens: int) -> None:
        """Clear what lies beyond an extend about to write ``[start, start + num_tokens)``."""
        end = start + num_tokens
        if start and self.reads_lengths:
            self._written[slot] = max(end, self._written[slot])
            return
        self._clear(slot, end, self._written[slot])
        self._written[slot] = end

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot over another."""
        if source != destination:
            pitch = self.capacity * self._token_bytes
            pairs = zip(self.pointers(source), self.pointers(destination), strict=True)
            for from_pointer, to_pointer in pairs if length else ():
                self._device.copy_rows(
                    Rows(to_pointer, pitch),
                    Rows(from_pointer, pitch),
                    width=length * self._token_bytes,
                    rows=self._num_heads,
                )
            self._clear(destination, length, self._written[destination])
            self._written[destination] = length
        self.lengths[destination] = length

    def free(self) -> None:
        """Give the memory back."""
        self._free(self._buffers)
        self._buffers = []

    def _require_buffers(self) -> None:
        if not self._buffers:
            raise EngineError(
                "the cache's memory was lost while it was resized; open the engine again"
            )

    def _free(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            self._device.free(buffer)

    def _clear(self, slot: int, begin: int, end: int) -> None:
        if begin >= end:
            return
        pitch = self.capacity * self._token_bytes
        for pointer in self.pointers(slot):
            self._device.zero_rows(
                Rows(pointer + begin * self._token_bytes, pitch),
                width=(end - begin) * self._token_bytes,
                rows=self._num_heads,
            )

    def _row_bytes(self, capacity: int) -> int:
        return self._num_heads * capacity * self._token_bytes

    def _buffer_bytes(self, capacity: int) -> int:
        return len(self.lengths) * self._row_bytes(capacity)
