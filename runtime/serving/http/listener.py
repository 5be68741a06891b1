"""HTTP listeners: uvicorn on the event loop that gRPC runs on, behind the same security."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.http.connections import Connections
from outrider.runtime.serving.http.gate import HttpGate
from outrider.runtime.serving.http.protocol import STALL_S, BoundedProtocol
from outrider.runtime.serving.http.routes import HttpRoute
from outrider.runtime.serving.http.tls import reloaded_context
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.addresses import (
    UNIX,
    is_reachable,
    owners_sockets,
    prepare_socket,
    split_address,
)
from outrider.runtime.serving.security.gate import Gate, Refused

OPTION = "http_address"
BACKLOG = 512
KEEP_ALIVE_S = 75
"""An idle connection is kept; longer than most proxies keep theirs."""
GRACE_S = 2
"""For answers that are on their way when the listener stops."""


class _Server(uvicorn.Server):
    """A server of uvicorn's that leaves the process's signals alone, and connections to ``Connections``."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup([])
        known = self.server_state.connections
        for bound in sockets or ():
            self._connections.begin(bound, self._protocol, lambda: len(known))
        self.is_listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and the connections."""
        await self._connections.end()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the process has handlers of its own."""
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where and within what to listen.

    Attributes:
        key: setting of the address.
        address: "HOST:PORT", port 0 for a free one, or "unix:PATH".
        max_connections: at once; further ones are closed.
        stall_timeout_s: for a piece of an answer to be read, before its request ends.
        is_plain_at_home: whether there is no TLS on addresses that other machines do not reach.
        keep_alive_s: that an idle connection is kept; 0 closes each behind its answer.
    """

    key: str = OPTION
    address: str
    max_connections: int
    stall_timeout_s: float = 30.0
    is_plain_at_home: bool = False
    keep_alive_s: int = KEEP_ALIVE_S


class HttpListener:
    """Answers routes over HTTP, from ``start`` to ``stop``.

    Args:
        routes: to answer.
        security: authentication; its certificate serves every address.
        options: where and within what.
        refused: called for each request that the gate refuses.

    Raises:
        ConfigError: the address has to have TLS.
    """

    def __init__(
        self,
        routes: Sequence[HttpRoute],
        security: Security,
        options: HttpOptions,
        refused: Refused = lambda *_: None,
    ) -> None:
        self._options = options
        address, files, certificate = (
            options.address,
            security.options.certificate_files,
            security.certificate,
        )
        is_socket = address.startswith(UNIX)
        if not is_socket:
            split_address(options.key, address)
        security.check(options.key, address)
        gate = HttpGate(
            Gate(security.authenticator, refused, security.places.let_in, security.places.left),
            routes,
            has_open_health=security.options.has_open_health,
            # What no browser reaches has no names to mistake.
            is_loopback_only=not is_socket and not is_reachable(address),
        )
        context = None
        needs_tls = is_reachable(address) or not options.is_plain_at_home
        if needs_tls and files is not None and certificate is not None:
            context = reloaded_context(files, certificate)
        connections = Connections(context, options.max_connections)
        self._server = _Server(_configuration(gate, options), connections)
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The bound port, once started; 0 for a Unix socket."""
        return self._port

    @property
    def places(self) -> dict[int, int]:
        """See ``Listener.places``."""
        return {self._port: self._options.max_connections} if self._port else {}

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        bound = _bind(self._options)
        if bound.family != socket.AF_UNIX:
            self._port = bound.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([bound]))
        listening = asyncio.ensure_future(self._server.is_listening.wait())
        await asyncio.wait({listening, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self._serving

    async def stop(self) -> None:
        """Close the port and the connections."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            # Its own: what another server has bound is not there for this one to remove.
            if self._options.address.startswith(UNIX):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._options.address.removeprefix(UNIX))


def _bind(options: HttpOptions) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        if options.address.startswith(UNIX):
            path = Path(options.address.removeprefix(UNIX))
            prepare_socket(options.key, path)
            bound = socket.socket(socket.AF_UNIX)
            try:
                with owners_sockets():
                    bound.bind(str(path))
                bound.listen(BACKLOG)
            except OSError:
                bound.close()
                raise
            return bound
        host, port = split_address(options.key, options.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(options.key, "must be free to bind") from error


def _configuration(gate: HttpGate, options: HttpOptions) -> uvicorn.Config:
    """Return uvicorn's settings: a gate before all, and nothing that it would say or do of its own accord."""

    class Protocol(BoundedProtocol):
        most_connections = options.max_connections
        # The request ends first, and notes why.
        stall_s = max(STALL_S, 2.0 * options.stall_timeout_s)

    return uvicorn.Config(
        gate,
        http=Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # What strangers send is no event.
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=GRACE_S,
    )
