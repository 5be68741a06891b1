"""The listener for metrics: HTTP of its own, behind the same credentials as every method of gRPC.

Whatever a scraper says it accepts, it gets text 0.0.4: later formats rename what dashboards look for.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, ThreadingMixIn, UnixStreamServer
from typing import Any

from outrider.runtime.core.errors import ConfigError, PermissionDenied, ServingError
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.addresses import (
    UNIX,
    is_reachable,
    owners_sockets,
    prepare_socket,
    split_address,
)
from outrider.runtime.serving.security.authenticator import (
    Authenticator,
    PresentedCredentials,
    check_scope,
    sole_header,
)
from outrider.runtime.serving.security.certificate import ServerCertificate, server_context
from outrider.runtime.serving.security.options import CertificateFiles
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

OPTION = "metrics_address"
SCOPE = "metrics"
MOST_CONNECTIONS = 16
"""At once; each has a thread. Further ones are closed."""
PATIENCE_S = 10.0
"""Between two pieces of a handshake or a request."""
MOST_S = 30.0
"""For a handshake, a request and its answer together."""
POLL_S = 0.5
"""Between two looks at whether it is closed."""

log = logging.getLogger(__name__)


class MetricsListener:
    """Answers scrapes of a registry on an address, from construction to ``close``.

    Args:
        address: "HOST:PORT", port 0 for a free one, or "unix:PATH".
        registry: to tell.
        security: authentication; its certificate serves addresses that other machines reach.
        refused: called for each scrape that is refused.
    """

    def __init__(
        self,
        address: str,
        registry: Collector,
        security: Security,
        refused: Callable[[ServingError], None] = lambda error: None,
    ) -> None:
        security.check(OPTION, address)
        files = security.options.certificate_files if is_reachable(address) else None
        current = security.certificate
        tls = None if files is None or current is None else _Tls(files, current)
        try:
            self._server = _listen(address)
        except OSError as error:
            raise ConfigError(OPTION, "must be free to bind") from error
        self._server.begin(registry, security.authenticator, tls, refused)
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True).start()

    @property
    def port(self) -> int:
        """The bound port; 0 for a Unix socket."""
        bound = self._server.server_address
        return bound[1] if isinstance(bound, tuple) else 0

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


class _Tls:
    """TLS by the server's certificate, of Python's own library, which reads files only.

    Raises:
        ConfigError: the files have changed since they were checked.
    """

    def __init__(self, files: CertificateFiles, current: Callable[[], ServerCertificate]) -> None:
        self._files = files
        self._current = current
        self._lock = threading.Lock()
        self._last = current()
        try:
            self._context = server_context(files, self._last.client_ca)
        except (OSError, ValueError):
            raise ConfigError(
                "tls_certificate", "must not change while the server starts"
            ) from None

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a connection that is to shake hands, by the certificate that is current."""
        with self._lock:
            certificate = self._current()
            if certificate is not self._last:
                self._last = certificate
                self._renew(certificate.client_ca)
            context = self._context
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _renew(self, client_ca: bytes | None) -> None:
        try:
            self._context = server_context(self._files, client_ca)
        except (OSError, ValueError):
            # They have changed once more since they were checked; the next look finds that.
            log.error("metrics: the certificate's files cannot be read, the old one stays")


class _Server(ThreadingMixIn, BaseServer):
    """Answers in bounded many threads; further connections are closed."""

    daemon_threads = True

    def begin(
        self,
        registry: Collector,
        authenticator: Authenticator,
        tls: _Tls | None,
        refused: Callable[[ServingError], None],
    ) -> None:
        """Note what to answer from, before anything is."""
        self.registry, self.authenticator, self.refused = registry, authenticator, refused
        self._tls = tls
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        connection = request
        try:
            request.settimeout(PATIENCE_S)
            if self._tls is not None:
                connection = self._tls.wrap(request)
            # Who sends a letter now and then would keep his place for ever.
            end = threading.Timer(MOST_S, _cut, (connection,))
            end.daemon = True
            end.start()
            try:
                if self._tls is not None:
                    connection.do_handshake()
                super().process_request_thread(connection, client_address)
            finally:
                end.cancel()
        except OSError:
            self.shutdown_request(connection)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a scraper that went away is no event, and a traceback may hold what it sent."""


def _cut(connection: socket.socket) -> None:
    """End a connection that another thread may be reading from."""
    with suppress(OSError):
        # Not TLS's own, which would wait for an answer.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _TcpServer(_Server, TCPServer):
    allow_reuse_address = True


class _TcpServer6(_TcpServer):
    address_family = socket.AF_INET6


class _UnixServer(_Server, UnixStreamServer):
    def server_close(self) -> None:
        super().server_close()
        os.unlink(self.server_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    server_version = "outrider"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a scrape, of whatever path."""
        authenticator = self.server.authenticator
        try:
            check_scope(authenticator.identify(self._presented()), SCOPE)
        except ServingError as error:
            self.server.refused(error)
            is_known = isinstance(error, PermissionDenied)
            self._answer(
                403 if is_known else 401, "text/plain; charset=utf-8", f"{error}\n".encode()
            )
            return
        self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self.server.registry))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no scrape, without a word of what it was."""
        self._answer(code, "text/plain; charset=utf-8", b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _presented(self) -> PresentedCredentials:
        values = self.headers.get_all("authorization", [])
        names: tuple[str, ...] = ()
        if isinstance(self.connection, ssl.SSLSocket):
            certificate = self.connection.getpeercert() or {}
            entries: Any = certificate.get("subjectAltName", ())
            names = tuple(name for kind, name in entries if kind in ("DNS", "URI"))
        return PresentedCredentials(authorization=sole_header(values), certificate_names=names)

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _listen(address: str) -> _Server:
    """Return a server that has bound an address."""
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        prepare_socket(OPTION, path)
        with owners_sockets():
            return _UnixServer(str(path), _Handler)
    host, port = split_address(OPTION, address)
    kind = _TcpServer6 if ":" in host else _TcpServer
    return kind((host, port), _Handler)
