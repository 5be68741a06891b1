"""Connections of an HTTP listener, their TLS handshakes bounded in time and number.

The loop's own servers tell a protocol of a connection once its handshake has ended, so that those who never begin one
would be counted by nobody, and each of them holds a file.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

PATIENCE_S = 10.0
"""For a handshake, as of gRPC's."""
RETRY_S = 1.0
"""After the system had no room for a connection."""


class Connections:
    """Accepts the connections of one listener.

    Args:
        context: gives each connection its context for TLS; None without.
        most: connections at once, those that shake hands included; further ones are closed.
    """

    def __init__(self, context: Callable[[], ssl.SSLContext] | None, most: int) -> None:
        self._context = context
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def begin(
        self,
        bound: socket.socket,
        make: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        """Accept connections from now on.

        Args:
            bound: where to.
            make: makes the protocol of one that has shaken hands.
            num_connections: returns how many of those there are.
        """
        bound.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(bound, make, num_connections))

    async def end(self) -> None:
        """Accept no more, and close those that have not shaken hands."""
        tasks = [*self._tasks] if self._accepting is None else [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(
        self,
        bound: socket.socket,
        make: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(bound)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._tasks) + num_connections() >= self._most:
                connection.close()
                continue
            task = loop.create_task(self._shake(connection, make))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        context = None if self._context is None else self._context()
        patience_s = None if context is None else PATIENCE_S
        try:
            await loop.connect_accepted_socket(
                make, connection, ssl=context, ssl_handshake_timeout=patience_s
            )
        except OSError:
            # What strangers send is no event.
            connection.close()
