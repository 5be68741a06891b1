"""A server around a served model, as ``runtime.serving.process.serve`` makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.protocols import services_of
from outrider.runtime.serving.readiness import Listener, ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.supervision.supervisor import Supervisor

MakeListeners: TypeAlias = Callable[[ServerState, Security], Sequence[Listener]]


def server_of(
    serving: LoadedModel,
    *,
    security: Security | None = None,
    options: ServeOptions | None = None,
    listeners: MakeListeners = lambda readiness, security: (),
    **told: Any,
) -> Server:
    """Return a server of the dialects that ``options`` ask for; ``told`` are further arguments of its ledger."""
    security = security or Security()
    readiness = ServerState(
        RequestAccounting(Metrics(), serving.clock, is_listed=security.is_listed, **told)
    )
    return Server(
        readiness,
        serving.config,
        serving.limits,
        security=security,
        services=services_of(options or ServeOptions(), readiness),
        listeners=listeners(readiness, security),
    )


async def begin(server: Server, serving: LoadedModel, *addresses: str) -> int:
    """Return the port on which a model is served."""
    port = await server.listen(*addresses or ("127.0.0.1:0",))
    await server.open(serving)
    return port


def supervisor_of(server: Server) -> Supervisor:
    """Return who watches the model that a server has opened."""
    assert server.supervisor is not None
    return server.supervisor
