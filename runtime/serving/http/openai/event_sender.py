"""Server-sent events of one HTTP answer: its head once, and pieces behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from outrider.runtime.serving.http.responses import EVENTS
from starlette.types import Send

PING = b": ping\n\n"
# Proxies that keep pieces back would make a stream halt.
_HEADERS = (EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventSender:
    """Sends the pieces of an answer of events; several callers may begin it at once."""

    def __init__(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        self._send = send
        self._headers = [*_HEADERS, *headers.items()]
        self._has_started = False
        self._starting = asyncio.Lock()

    async def start(self) -> bool:
        """Return whether the answer has begun, and count it as begun: the caller sends its head otherwise."""
        async with self._starting:
            has_started, self._has_started = self._has_started, True
        return has_started

    async def send(self, piece: bytes, *, is_last: bool = False) -> None:
        """Send a piece, behind the head."""
        await self.open()
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    async def open(self) -> None:
        """Send the head, once."""
        if self._has_started:
            return
        async with self._starting:
            if not self._has_started:
                head = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(head)
                self._has_started = True

    async def ping(self) -> None:
        """Send a comment."""
        await self.send(PING)
