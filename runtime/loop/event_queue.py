"""Events on their way from the worker to those who asked, handed over at a moment of its choosing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from outrider.runtime.core.events import Event
from outrider.runtime.core.request import Request

logger = logging.getLogger(__name__)

Deliver = Callable[[Event], None]


class EventQueue:
    """A queue of events, none of which overtakes another, and the receivers by request.

    ``open`` is called under the inbox's lock, before the worker can know the request; all else by the worker's thread.
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Deliver] = {}
        self._waiting: deque[tuple[Deliver, Event]] = deque()
        self._calls: list[Callable[[], None]] = []

    def open(self, request: Request, deliver: Deliver) -> None:
        """Have a request's events go to ``deliver``."""
        self._receivers[request.spec.internal_id] = deliver

    def put(self, events: Sequence[tuple[Request, Event]]) -> None:
        """Leave events for the next ``send``."""
        for request, event in events:
            self._waiting.append((self._receivers[request.spec.internal_id], event))

    def close(self, request: Request, event: Event) -> None:
        """Leave a request's terminal event for the next ``send``, and forget its receiver."""
        self._waiting.append((self._receivers.pop(request.spec.internal_id), event))

    def after_sending(self, call: Callable[[], None]) -> None:
        """Call something after each ``send``."""
        self._calls.append(call)

    def send(self) -> None:
        """Hand over all that waits."""
        while self._waiting:
            deliver, event = self._waiting.popleft()
            try:
                deliver(event)
            except Exception:  # a receiver that is gone must not end its neighbours
                logger.exception("an event could not be delivered")
        for call in self._calls:
            call()
