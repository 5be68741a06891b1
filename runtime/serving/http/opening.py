"""The one place that imports what HTTP needs: its libraries come with the extra ``http``."""

from __future__ import annotations

from typing import Protocol

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.intake import Intake, Listener
from outrider.runtime.serving.opening import ServeOptions

LIBRARIES = ("starlette", "uvicorn", "httptools")


class PortListener(Listener, Protocol):
    """A listener on a port, which is known once it has started."""

    @property
    def port(self) -> int:
        """The bound port."""
        ...


def open_listeners(intake: Intake, doors: Doors, options: ServeOptions) -> list[PortListener]:
    """Return the listener that the options ask for, if any; it does not listen yet.

    Raises:
        ConfigError: the address has to have TLS, or a library is missing.
    """
    if options.http_address is None:
        return []
    try:
        from outrider.runtime.serving.http.listener import HttpListener, HttpOptions
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        rule = f"needs {', '.join(LIBRARIES)}: install outrider-server[http]"
        raise ConfigError("http_address", rule) from error
    found = HttpOptions(
        address=options.http_address,
        max_bytes=options.limits.max_message_bytes,
        max_connections=options.config.max_connections,
    )
    return [HttpListener(intake, doors, found)]
