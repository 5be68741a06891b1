"""Which request holds which rows of the caches.

Requests of one row stand at the beginning of the slots, beam searches at the end; what joins or leaves on one side
moves nothing on the other:

    slots    [0 ... num_live)  requests   [ ... free ... )   [ ... max_batch)  searches

Invariants:

* W3  ``requests[i]`` holds slot i.
* W4  The slots of ``searches`` are the reserved ones, each held by one search.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outrider.engines.base import Engine, EngineError
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.loop.beams.search import BeamSearch
from outrider.runtime.loop.slots import SlotAllocator
from outrider.runtime.prefix_cache.reuse import Prefixes

logger = logging.getLogger(__name__)


class LiveRows:
    """Requests that hold slots, and their rows in the caches of all engines.

    Args:
        engines: the target and, where there is one, the draft.
        num_slots: rows in use at most.
        prefixes: keeps the texts of those that end well; None where nothing is kept.
    """

    def __init__(
        self, engines: Sequence[Engine], num_slots: int, prefixes: Prefixes | None = None
    ) -> None:
        self._engines = engines
        self.prefixes = prefixes
        self._num_admitted = 0
        self.slots = SlotAllocator(num_slots)
        self.requests: list[Request] = []
        self.searches: list[BeamSearch] = []

    @property
    def all_requests(self) -> list[Request]:
        """Everyone who holds slots."""
        return [*self.requests, *[search.request for search in self.searches]]

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of theirs whose keys and values the target's slots hold."""
        rows = sum(request.cache.num_computed for request in self.requests)
        return rows + sum(sum(search.cache.lengths) for search in self.searches)

    def admit(self, group: Sequence[Request]) -> None:
        """Give the requests of a group, mostly one, their slots; there must be as many free."""
        for request in group:
            order = self._num_admitted
            self._num_admitted += 1
            if request.spec.beams is None:
                request.admit(slot=self.slots.allocate(), order=order)
                self.requests.append(request)
            else:
                slots = self.slots.reserve(request.spec.num_slots)
                self.searches.append(BeamSearch(request, self._engines[0], slots, order))
        if len(group) == 1:
            return
        for request in group:
            request.group.name = group[0].spec.internal_id
        if group[0].state is not State.DECODING:
            group[0].lead(group[1:])

    def free(self, requests: Sequence[Request]) -> list[Request]:
        """Give slots back, highest first so that only rows that go on are moved.

        Returns:
            Requests that were to go on, but whose row could not be moved.
        """
        if not requests:
            return []
        if self.prefixes is not None:
            self.prefixes.keep_finished(requests)
        lost = self._free_searches(requests)
        rows = [r.slot for r in requests if r.slot is not None]
        for slot in sorted(rows, reverse=True):
            self.requests[slot].slot = None
            move = self.slots.free(slot)
            last = self.requests.pop()
            if move is None:
                continue
            self.requests[slot] = last
            last.slot = slot
            # The last row may move more than once.
            if not self._move(last, move.source, slot) and last not in lost:
                lost.append(last)
        self._trim()
        return lost

    def _free_searches(self, requests: Sequence[Request]) -> list[Request]:
        """Give back all slots of the searches among these requests, lowest first; the answer is that of ``free``."""
        ended = {id(request) for request in requests if request.spec.beams is not None}
        leaving = [search for search in self.searches if id(search.request) in ended]
        self.searches = [search for search in self.searches if id(search.request) not in ended]
        for search in leaving:
            search.request.slot = None
        lost: list[Request] = []
        for slot in sorted(slot for search in leaving for slot in search.slots):
            move = self.slots.release(slot)
            if move is None:
                continue
            owner = next(search for search in self.searches if move.source in search.slots)
            # Several rows of one search may move, and it is lost once.
            if not owner.move(move.source, slot) and owner.request not in lost:
                lost.append(owner.request)
        return lost

    def _trim(self) -> None:
        """Let the engines forget what the rows that left held; larger caches than needed harm nobody."""
        for index, engine in enumerate(self._engines):
            try:
                engine.trim(self._lengths(index))
            except EngineError:
                logger.exception("a cache could not be made smaller")

    def _lengths(self, index: int) -> list[int | None]:
        """Tokens that one engine holds of every slot up to the last in use; None for slots that hold nothing at all."""
        rows: list[int | None] = [
            None if length < 0 else length
            for length in (_cached(one)[index] for one in self.requests)
        ]
        if index > 0 or not self.searches:  # searches are the target's alone
            return rows
        rows += [None] * (self.slots.num_slots - len(rows))
        for search in self.searches:
            for slot, length in zip(search.slots, search.cache.lengths, strict=True):
                rows[slot] = length
        return rows

    def _move(self, request: Request, source: int, destination: int) -> bool:
        try:
            for engine, length in zip(self._engines, _cached(request), strict=False):
                # A row that has read its source alone holds that.
                if length > 0 or (length == 0 and engine.limits.max_source):
                    engine.move_slot(source, destination, length)
        except EngineError:
            logger.exception("a row could not be moved")
            return False
        return True


def _cached(request: Request) -> tuple[int, int]:
    """Return the leading tokens that the caches of target and draft hold; -1 for a source that is not read."""
    return request.cache.num_computed, request.cache.draft_computed
