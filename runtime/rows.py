"""Which request holds which row of the caches.

Invariants:

* W3  ``requests[i]`` holds slot i.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engines.base import Engine, EngineError
from runtime.core.request import Request
from runtime.core.slots import SlotAllocator

logger = logging.getLogger(__name__)


class LiveRows:
    """Requests that hold slots, and their rows in the caches of all engines.

    Args:
        engines: the target and, where there is one, the draft.
        num_slots: rows in use at most.
    """

    def __init__(self, engines: Sequence[Engine], num_slots: int) -> None:
        self._engines = engines
        self._num_admitted = 0
        self.slots = SlotAllocator(num_slots)
        self.requests: list[Request] = []

    def admit(self, request: Request) -> None:
        """Give a request the next slot; there must be a free one."""
        request.admit(slot=self.slots.allocate(), order=self._num_admitted)
        self._num_admitted += 1
        self.requests.append(request)

    def free(self, requests: Sequence[Request]) -> list[Request]:
        """Give slots back, highest first so that only rows that go on are moved.

        Returns:
            Requests that were to go on, but whose row could not be moved.
        """
        lost: list[Request] = []
        for slot in sorted((r.slot for r in requests if r.slot is not None), reverse=True):
            self.requests[slot].slot = None
            move = self.slots.free(slot)
            last = self.requests.pop()
            if move is None:
                continue
            self.requests[slot] = last
            last.slot = slot
            if not self._move(last, move.source, slot):
                lost.append(last)
        if requests:
            self._trim()
        return lost

    def _trim(self) -> None:
        """Let the engines forget what the rows that left held; larger caches than needed harm nobody."""
        lengths = [(request.num_computed, request.draft_computed) for request in self.requests]
        for index, engine in enumerate(self._engines):
            try:
                engine.trim([of_engines[index] for of_engines in lengths])
            except EngineError:
                logger.exception("a cache could not be made smaller")

    def _move(self, request: Request, source: int, destination: int) -> bool:
        lengths = (request.num_computed, request.draft_computed)
        try:
            for engine, length in zip(self._engines, lengths, strict=False):
                if length > 0:
                    engine.move_slot(source, destination, length)
        except EngineError:
            logger.exception("a row could not be moved")
            return False
        return True
