"""Events on their way from the worker to those who asked, handed over at a moment of its choosing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from outrider.runtime.core.params import Event
from outrider.runtime.loop.inbox import Deliver

logger = logging.getLogger(__name__)


class Outgoing:
    """A queue of events; none overtakes another. The worker's thread owns it."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Deliver, Event]] = deque()
        self._calls: list[Callable[[], None]] = []

    def put(self, deliver: Deliver, event: Event) -> None:
        """Leave an event for the next ``send``."""
        self._waiting.append((deliver, event))

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
