"""The HTTP listener: uvicorn on the event loop that gRPC runs on, behind the same security."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import uvicorn
from outrider.runtime.core.errors import ConfigError, ServingError
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.http.app import router
from outrider.runtime.serving.http.callers import PROTOCOL
from outrider.runtime.serving.http.gate import Gate
from outrider.runtime.serving.http.handshakes import Handshakes
from outrider.runtime.serving.http.pages import read_pages
from outrider.runtime.serving.http.protocol import STALL_S, BoundedProtocol
from outrider.runtime.serving.http.tls import reloaded_context
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.addresses import UNIX, is_reachable, split_address

OPTION = "http_address"
BACKLOG = 512
KEEP_ALIVE_S = 75
"""An idle connection is kept; longer than most proxies keep theirs."""
GRACE_S = 2
"""For answers that are on their way when the listener stops."""


class _Server(uvicorn.Server):
    """A server of uvicorn's that leaves the process's signals alone; ``is_listening`` is set once it listens."""

    def __init__(self, config: uvicorn.Config, handshakes: Handshakes | None) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._handshakes = handshakes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        if self._handshakes is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            connections = self.server_state.connections
            for bound in sockets or ():
                self._handshakes.begin(bound, self._protocol, lambda: len(connections))
        self.is_listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and the connections."""
        if self._handshakes is not None:
            await self._handshakes.end()
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
        address: "HOST:PORT", port 0 for a free one.
        max_bytes: of a request's body.
        max_connections: at once; further ones are closed.
        stall_timeout_s: for a piece of an answer to be read, before its request ends.
    """

    address: str
    max_bytes: int
    max_connections: int
    stall_timeout_s: float = 30.0


class HttpListener:
    """Answers OpenAI's protocol over HTTP, from ``start`` to ``stop``.

    Args:
        readiness: takes the requests.
        security: authentication; its certificate serves every address.
        options: where and within what.

    Raises:
        ConfigError: the address has to have TLS, or nobody could be let in.
    """

    def __init__(self, readiness: ServerState, security: Security, options: HttpOptions) -> None:
        if options.address.startswith(UNIX):
            raise ConfigError(OPTION, "must be HOST:PORT")
        self._host, self._port = split_address(OPTION, options.address)
        security.check(OPTION, options.address)
        asked = security.options
        if asked.tls_client_ca is not None and asked.keys is None and asked.jwt_keys is None:
            rule = "needs keys or jwt_keys: here a certificate does not say whose requests they are"
            raise ConfigError(OPTION, rule)
        self._readiness = readiness
        pages = read_pages()
        app = router(readiness, max_bytes=options.max_bytes, started_s=time.time(), pages=pages)
        gate = Gate(
            app,
            security.authenticator,
            pages=tuple(pages),
            has_open_health=security.options.has_open_health,
            is_reachable=is_reachable(options.address),
            refused=self._note_refusal,
        )
        files, certificate = security.options.certificate_files, security.certificate
        handshakes = None
        if files is not None and certificate is not None:
            context = reloaded_context(files, certificate)
            handshakes = Handshakes(context, options.max_connections)
        self._server = _Server(_configuration(gate, options), handshakes)
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port, once started."""
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            bound = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(OPTION, "must be free to bind") from error
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

    def _note_refusal(
        self, route: str, peer: str, error: ServingError, identity: Identity | None
    ) -> None:
        caller = ClientIdentity(peer=peer, protocol=PROTOCOL)
        if identity is not None:
            caller = replace(caller, tenant=identity.tenant, key=identity.key)
        self._readiness.accounting.refused(route, caller, error)


def _configuration(gate: Gate, options: HttpOptions) -> uvicorn.Config:
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
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
