"""A server around a served model, as ``runtime.serving.process.serve`` makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from outrider.runtime.serving.dialects import services_of
from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.intake import Intake, Listener
from outrider.runtime.serving.ledger import Ledger
from outrider.runtime.serving.opening import ServeOptions
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.supervision.supervisor import Supervisor
from outrider.runtime.serving.watch.metrics import Metrics

MakeListeners: TypeAlias = Callable[[Intake, Doors], Sequence[Listener]]


def server_of(
    serving: Serving,
    *,
    doors: Doors | None = None,
    options: ServeOptions | None = None,
    listeners: MakeListeners = lambda intake, doors: (),
    **told: Any,
) -> Server:
    """Return a server of the dialects that ``options`` ask for; ``told`` are further arguments of its ledger."""
    doors = doors or Doors()
    intake = Intake(Ledger(Metrics(), serving.clock, is_listed=doors.is_listed, **told))
    return Server(
        intake,
        serving.config,
        serving.limits,
        doors=doors,
        services=services_of(options or ServeOptions(), intake),
        listeners=listeners(intake, doors),
    )


async def begin(server: Server, serving: Serving, *addresses: str) -> int:
    """Return the port on which a model is served."""
    port = await server.listen(*addresses or ("127.0.0.1:0",))
    await server.open(serving)
    return port


def supervisor_of(server: Server) -> Supervisor:
    """Return who watches the model that a server has opened."""
    assert server.supervisor is not None
    return server.supervisor
