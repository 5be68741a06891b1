"""Which rows of the KV cache are live.

Invariants:

* S1  The live slots are exactly 0..num_live-1, so that one extend over a prefix reaches all of them.
* S2  Freeing moves at most one row: the last live one, into the hole.
* S3  Searches hold the last ``num_reserved`` slots, so that they never stand among the live ones; releasing one moves
  at most the lowest of them, into the hole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """A live row to copy from slot ``source`` to slot ``destination``."""

    source: int
    destination: int


class SlotAllocator:
    """Counts live slots; the rows themselves are whoever's asked."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError("there must be at least one slot")
        self._num_slots = num_slots
        self._num_live = 0
        self._num_reserved = 0

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._num_slots

    @property
    def num_live(self) -> int:
        """Slots in use by single rows."""
        return self._num_live

    @property
    def num_reserved(self) -> int:
        """Slots in use by searches."""
        return self._num_reserved

    @property
    def num_free(self) -> int:
        """Slots that can still be allocated or reserved."""
        return self._num_slots - self._num_live - self._num_reserved

    def allocate(self) -> int:
        """Take the slot after the last live one."""
        if self.num_free == 0:
            raise ValueError("no slot is free")
        self._num_live += 1
        return self._num_live - 1

    def free(self, slot: int) -> Move | None:
        """Give a live slot back; the answer says which row must move to keep S1."""
        if not 0 <= slot < self._num_live:
            raise ValueError("the slot is not live")
        self._num_live -= 1
        return None if slot == self._num_live else Move(self._num_live, slot)

    def reserve(self, count: int) -> range:
        """Take slots for a search, all or none: those below the ones reserved already."""
        if count > self.num_free:
            raise ValueError("not enough slots are free")
        end = self._num_slots - self._num_reserved
        self._num_reserved += count
        return range(end - count, end)

    def release(self, slot: int) -> Move | None:
        """Give a reserved slot back; the answer says which row must move to keep S3."""
        lowest = self._num_slots - self._num_reserved
        if not lowest <= slot < self._num_slots:
            raise ValueError("the slot is not reserved")
        self._num_reserved -= 1
        return None if slot == lowest else Move(lowest, slot)
