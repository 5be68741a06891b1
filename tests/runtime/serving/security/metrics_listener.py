"""The listener of metrics on an event loop of a thread, and a scraper without a library."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.http.factory import PortListener, open_metrics
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.registry import Collector

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def things() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "Counted", registry=registry).inc(3)
    return registry


@contextmanager
def listening(
    security: Security,
    address: str = "127.0.0.1:0",
    *,
    collector: Collector | None = None,
    metrics: Metrics | None = None,
) -> Iterator[PortListener]:
    state = ServerState(RequestAccounting(metrics or Metrics(), time.monotonic))
    listener = open_metrics(state, security, address, collector or things())
    assert listener is not None
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(listener.start(), loop).result()
        yield listener
        asyncio.run_coroutine_threadsafe(listener.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def get(
    connection: http.client.HTTPConnection,
    headers: Mapping[str, str] = {},
    method: str = "GET",
    path: str = "/metrics",
) -> tuple[int, str | None, str]:
    """Ask once; return status, content type and body."""
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def at(listener: PortListener, host: str = "127.0.0.1") -> http.client.HTTPConnection:
    return http.client.HTTPConnection(host, listener.port, timeout=20)
