"""The one place that imports what HTTP needs: its libraries come with the extra ``http``."""

from __future__ import annotations

from typing import Protocol

from outrider.runtime.serving.readiness import Listener, ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.settings import ServeOptions


class PortListener(Listener, Protocol):
    """A listener on a port, which is known once it has started."""

    @property
    def port(self) -> int:
        """The bound port."""
        ...


def open_listeners(
    readiness: ServerState, security: Security, options: ServeOptions
) -> list[PortListener]:
    """Return the listener that the options ask for, if any; it does not listen yet.

    Raises:
        ConfigError: the address has to have TLS, or nobody could be let in.
        ModuleNotFoundError: a library of the extra ``http`` is missing.
    """
    if options.http_address is None:
        return []
    from outrider.runtime.serving.http.listener import HttpListener, HttpOptions

    found = HttpOptions(
        address=options.http_address,
        max_bytes=options.limits.max_message_bytes,
        max_connections=options.config.max_connections,
        stall_timeout_s=options.config.stall_timeout_s,
    )
    return [HttpListener(readiness, security, found)]
