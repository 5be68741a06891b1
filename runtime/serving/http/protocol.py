"""One connection of HTTP/1.1: uvicorn's, with bounds on what a stranger may send and hold before he is known."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEADER_BYTES = 16 << 10
"""Of a request's target and all its headers together, as of a gRPC call's metadata."""
_HEADER_OVERHEAD = 32
"""Bytes beside its texts that a header counts, as in HTTP/2 (RFC 9113, section 10.5.1): it takes more in memory."""
PATIENCE_S = 10.0
"""For a connection's first request, for the headers of each to arrive, and for what is sent between two."""
MOST_PIPELINED = 16
"""Requests of a connection that wait behind the one that is answered; one read may bring thousands."""
STALL_S = 60.0
"""A connection whose client reads nothing of an answer is kept so long or longer: streams of tokens end before that."""


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections beyond ``most_connections``, with long headers, or that do not say what they want.

    Attributes:
        stall_s: seconds that a client may read nothing of an answer.
    """

    most_connections = 4096
    stall_s = STALL_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room for it."""
        super().connection_made(transport)
        self._num_header_bytes = 0
        # Since the parser told of anything.
        self._num_untold = 0
        self._patience: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that begin no request do not keep an idle connection.

        The parser tells of a header once it is whole, and keeps what it has of it, however long that is.
        """
        for start in range(0, len(data), MOST_HEADER_BYTES):
            piece = data[start : start + MOST_HEADER_BYTES]
            self._num_untold += len(piece)
            super().data_received(piece)
            if self._num_untold > MOST_HEADER_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                return
            if self.cycle is not None and self.cycle.response_complete:
                self._wait()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on writing."""
        self._stop_watching()
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._num_header_bytes = 0
        state: dict[str, Any] = self.scope["state"]
        state["abort"] = self.transport.abort
        state["certificate_names"] = self._certificate_names
        self._wait()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value) + _HEADER_OVERHEAD)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._num_untold = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Have the request answered."""
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests at once")
        if self.parser.should_upgrade() and self._has_body():
            # The parser would take the body for the next request.
            raise ValueError("another protocol asked for with a body")
        self._stop_waiting()
        super().on_headers_complete()

    def _certificate_names(self) -> list[str]:
        """Return subject alternative names of the client's certificate, which a trusted authority has signed."""
        certificate = self.transport.get_extra_info("peercert") or {}
        entries = certificate.get("subjectAltName", ())
        return [name for kind, name in entries if kind in ("DNS", "URI")]

    def _has_body(self) -> bool:
        given = dict(self.headers)
        return b"transfer-encoding" in given or given.get(b"content-length", b"0") != b"0"

    def _count(self, num_bytes: int) -> None:
        """Count bytes of headers; the parser ends the connection for what a callback raises."""
        self._num_untold = 0
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MOST_HEADER_BYTES:
            raise ValueError("headers too long")

    def _wait(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(PATIENCE_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() >= unread:
                self.transport.abort()
            else:
                self._watch_reader()

        self._stall = self.loop.call_later(self.stall_s, look)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
