"""The protocols that a server speaks beside ``outrider.v1``: add-ons, each off unless it is asked for.

Each is an entry point of the group ``outrider.protocols``: a function of a ``ServerState`` that returns a ``Service``.
"""

from __future__ import annotations

from outrider.engines.addons import NotInstalledError, load_addon
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.readiness import ServerState, Service
from outrider.runtime.serving.settings import ServeOptions

GROUP = "outrider.protocols"


def services_of(options: ServeOptions, readiness: ServerState) -> tuple[Service, ...]:
    """Return the protocols of gRPC that are asked for.

    Raises:
        ConfigError: one is not installed, or a library of it is not.
    """
    asked = {"kserve": options.has_kserve, "vllm_grpc": options.has_vllm_grpc}
    return tuple(open_protocol(name, readiness) for name, is_asked in asked.items() if is_asked)


def open_protocol(name: str, readiness: ServerState) -> Service:
    """Return the service of a protocol by the name of its entry point.

    Raises:
        ConfigError: it is not installed, or a library of it is not.
    """
    try:
        make = load_addon(GROUP, name)
    except NotInstalledError as error:
        raise ConfigError(name, error.rule) from error
    except ImportError as error:
        raise ConfigError(name, f"is not installed: {error}") from error
    service: Service = make(readiness)
    return service
