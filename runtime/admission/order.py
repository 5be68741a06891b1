"""Whose turn it is among those who wait for slots.

Knows tenants, priorities, deadlines and numbers of slots; no request, clock or thread. To add one and to take the next
takes a time that hardly depends on how many wait, and grows with the number of tenants. Rules:

* O1  Of one tenant the lower level goes first, then the earlier deadline, then who came first. A level is the priority
  that was asked for, less one for each ``LEVEL_S`` of waiting. Levels change at the same moments for all, so what stood
  in the right order stays in it.
* O2  Between tenants the lower level goes first, too. Here waiting lifts nobody above the best priority that anybody
  waits with: else a tenant's flood that has waited long would stand before all who come after it.
* O3  Of equal levels, the tenant that holds the fewest slots goes first, then the one whose turn is longest ago.
* O4  A tenant whose next request would hold more slots than its rules allow is passed over.
* O5  Free slots are kept for the next in turn where it needs more of them: nobody of its level or above overtakes it.
* O6  Where no more may wait, the tenant with the most waiters loses its last one to a newcomer whose tenant would have
  fewer even so, unless the newcomer's priority is worse.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from outrider.runtime.core.tenant import Claim

LEVEL_S = 5.0
"""Seconds of waiting that are worth one level of priority."""

Key = tuple[int, float, float]
"""Level at the clock's zero, deadline in seconds, number of arrival."""

T = TypeVar("T")
_by_key = attrgetter("key")


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """Who waits for slots, all at once.

    Attributes:
        item: whatever the owner of the queue has queued.
        key: what O1 compares.
    """

    item: T
    claim: Claim
    num_slots: int
    num_tokens: int
    key: Key


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """One tenant: those of it that wait, first in turn first, and what it holds.

    Attributes:
        priorities: how many wait with each.
        turn: number of the last time that one of them was taken; 0 before.
    """

    waiting: list[Waiter[T]] = field(default_factory=list)
    priorities: Counter[int] = field(default_factory=Counter)
    num_slots: int = 0
    num_tokens: int = 0
    num_held: int = 0
    turn: int = 0

    def has_room(self, claim: Claim, num_slots: int) -> bool:
        """Return whether the tenant may hold so many slots more."""
        most = claim.rules.max_slots
        return most is None or self.num_held + num_slots <= most

    def may_go(self) -> bool:
        """Return whether the first in turn waits for nothing but free slots."""
        return bool(self.waiting) and self.has_room(
            self.waiting[0].claim, self.waiting[0].num_slots
        )


class Queue(Generic[T]):
    """Waiters of all tenants, and the slots that each tenant holds.

    Attributes:
        num_tokens: prompt tokens of all waiters.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._reserving: Waiter[T] | None = None
        self._num_waiting = self._num_added = self._num_turns = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of waiters."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Waiter[T]]:
        """Yield all waiters, each tenant's in their order."""
        for line in self._lines.values():
            yield from line.waiting

    def add(self, item: T, claim: Claim, *, num_slots: int, num_tokens: int, now: float) -> None:
        """Have an item wait from now on."""
        self._num_added += 1
        waiter = Waiter(item, claim, num_slots, num_tokens, _key(claim, now, self._num_added))
        line = self._lines.setdefault(claim.tenant, _Line())
        insort(line.waiting, waiter, key=_by_key)
        self._count(line, waiter, 1)

    def take(self, num_free: int, now: float) -> list[Waiter[T]]:
        """Remove and return those who get their slots now, in turn; their tenants hold them until ``release``."""
        taken: list[Waiter[T]] = []
        while num_free > 0 and (first := self._first(now)) is not None:
            if first.num_slots > num_free:
                self._reserving = first
                break
            num_free -= first.num_slots
            line = self._lines[first.claim.tenant]
            self._num_turns += 1
            line.turn = self._num_turns
            line.num_held += first.num_slots
            self.remove(first)
            taken.append(first)
        return taken

    def release(self, tenant: str, num_slots: int) -> None:
        """Note that a tenant gave slots back."""
        self._lines[tenant].num_held -= num_slots
        self._forget_idle(tenant)

    def remove(self, waiter: Waiter[T]) -> None:
        """Have one wait no longer."""
        line = self._lines[waiter.claim.tenant]
        del line.waiting[bisect_left(line.waiting, waiter.key, key=_by_key)]
        self._count(line, waiter, -1)
        if self._reserving is waiter:
            self._reserving = None
        self._forget_idle(waiter.claim.tenant)

    def shrink(self, waiter: Waiter[T], item: T, num_slots: int) -> None:
        """Have another item, which needs fewer slots, wait in the same place."""
        self._lines[waiter.claim.tenant].num_slots -= waiter.num_slots - num_slots
        waiter.item, waiter.num_slots = item, num_slots

    def must_wait(self, claim: Claim, num_slots: int) -> bool:
        """Return whether a newcomer would wait though enough slots are free; ``take`` has been asked before."""
        line = self._lines.get(claim.tenant)
        if self._reserving is not None or (line is not None and line.waiting):
            return True
        return not (line or _Line[T]()).has_room(claim, num_slots)

    def num_waiting(self, tenant: str) -> int:
        """Waiters of one tenant."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.waiting)

    def crowder(self, claim: Claim) -> Waiter[T] | None:
        """Return who makes room for a newcomer in a full queue; None for nobody."""
        longest = max(self._lines.values(), key=lambda line: len(line.waiting), default=None)
        if longest is None or len(longest.waiting) <= self.num_waiting(claim.tenant) + 1:
            return None
        last = longest.waiting[-1]
        return last if last.claim.priority >= claim.priority else None

    def ahead(self, claim: Claim, now: float) -> tuple[float, float]:
        """Slots and prompt tokens of the tenant's waiters that a newcomer would stand behind, as if all were alike."""
        line = self._lines.get(claim.tenant)
        if line is None or not line.waiting:
            return 0.0, 0.0
        place = bisect_left(line.waiting, _key(claim, now, math.inf), key=_by_key)
        share = place / len(line.waiting)
        return line.num_slots * share, line.num_tokens * share

    def _first(self, now: float) -> Waiter[T] | None:
        """Return the next in turn of those who wait for nothing but free slots."""
        lines = [line for line in self._lines.values() if line.may_go()]
        if not lines:
            return None
        # O2
        floor = min(min(line.priorities) for line in lines) + _ticks(now)
        best = min(
            lines,
            key=lambda one: (
                max(one.waiting[0].key[0], floor),
                one.num_held,
                one.turn,
                one.waiting[0].key,
            ),
        ).waiting[0]
        reserving = self._reserving
        if reserving is None:
            return best
        # O5
        may_go = self._lines[reserving.claim.tenant].has_room(reserving.claim, reserving.num_slots)
        is_overtaken = max(best.key[0], floor) < max(reserving.key[0], floor)
        return best if is_overtaken or not may_go else reserving

    def _count(self, line: _Line[T], waiter: Waiter[T], sign: int) -> None:
        priority = waiter.claim.priority
        line.priorities[priority] += sign
        if not line.priorities[priority]:
            del line.priorities[priority]
        line.num_slots += sign * waiter.num_slots
        line.num_tokens += sign * waiter.num_tokens
        self.num_tokens += sign * waiter.num_tokens
        self._num_waiting += sign

    def _forget_idle(self, tenant: str) -> None:
        line = self._lines[tenant]
        if not line.waiting and not line.num_held:
            del self._lines[tenant]


def _ticks(now: float) -> int:
    return math.floor(now / LEVEL_S)


def _key(claim: Claim, now: float, number: float) -> Key:
    return claim.priority + _ticks(now), claim.deadline_s, number
