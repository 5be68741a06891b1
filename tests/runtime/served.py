"""A server around a served model, as ``runtime.serving.server.serve`` makes it."""

from __future__ import annotations

from typing import Any

from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.intake import Intake
from outrider.runtime.serving.ledger import Ledger
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.supervision.supervisor import Supervisor
from outrider.runtime.serving.watch.metrics import Metrics


def server_of(serving: Serving, *, doors: Doors | None = None, **told: Any) -> Server:
    """Return a server; ``told`` are further arguments of its ledger."""
    doors = doors or Doors()
    ledger = Ledger(Metrics(), serving.clock, is_listed=doors.is_listed, **told)
    return Server(Intake(ledger), serving.config, serving.limits, doors=doors)


async def begin(server: Server, serving: Serving, *addresses: str) -> int:
    """Return the port on which a model is served."""
    port = await server.listen(*addresses or ("127.0.0.1:0",))
    await server.open(serving)
    return port


def supervisor_of(server: Server) -> Supervisor:
    """Return who watches the model that a server has opened."""
    assert server.supervisor is not None
    return server.supervisor
