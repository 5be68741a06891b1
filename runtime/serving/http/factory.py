"""The one place that imports what HTTP needs, where it is asked for."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from outrider.runtime.core.errors import ConfigError, ServingError
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.readiness import Listener, ServerState
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.addresses import UNIX
from outrider.runtime.serving.settings import ServeOptions
from prometheus_client.registry import Collector

METRICS_CONNECTIONS = 64
"""At once, of scrapers and probes."""
OPENAI = "openai"


class PortListener(Listener, Protocol):
    """A listener on a port, which is known once it has started."""

    @property
    def port(self) -> int:
        """The bound port."""
        ...


def open_api(
    readiness: ServerState, security: Security, options: ServeOptions
) -> PortListener | None:
    """Return the listener of OpenAI's protocol, if it is asked for; it does not listen yet.

    Raises:
        ConfigError: the address has to have TLS.
    """
    if options.http_address is None:
        return None
    if options.http_address.startswith(UNIX):
        raise ConfigError("http_address", "must be HOST:PORT")
    from outrider.runtime.serving.http.app import api_routes
    from outrider.runtime.serving.http.listener import HttpListener, HttpOptions
    from outrider.runtime.serving.http.pages import read_pages

    max_bytes = options.limits.max_message_bytes
    routes = api_routes(readiness, max_bytes=max_bytes, started_s=time.time(), pages=read_pages())
    found = HttpOptions(
        address=options.http_address,
        max_connections=options.config.max_connections,
        stall_timeout_s=options.config.stall_timeout_s,
    )

    def refused(route: str, peer: str, error: ServingError, identity: Identity | None) -> None:
        client = ClientIdentity(peer=peer, protocol=OPENAI)
        if identity is not None:
            client = replace(client, tenant=identity.tenant, key=identity.key)
        readiness.accounting.refused(route, client, error)

    return HttpListener(routes, security, found, refused)


def open_metrics(
    readiness: ServerState, security: Security, address: str | None, collector: Collector
) -> PortListener | None:
    """Return the listener of metrics and probes, if it is asked for; it does not listen yet.

    Raises:
        ConfigError: the address has to have TLS.
    """
    if address is None:
        return None
    from outrider.runtime.serving.http.listener import HttpListener, HttpOptions
    from outrider.runtime.serving.http.operations import operations_routes

    found = HttpOptions(
        key="metrics_address",
        address=address,
        max_connections=METRICS_CONNECTIONS,
        is_plain_at_home=True,
        # Whoever asks now and then would keep a place of few for ever.
        keep_alive_s=0,
    )
    metrics = readiness.accounting.metrics

    def refused(route: str, peer: str, error: ServingError, identity: Identity | None) -> None:
        metrics.refused.labels(reason=error.reason).inc()

    return HttpListener(operations_routes(readiness, collector), security, found, refused)
