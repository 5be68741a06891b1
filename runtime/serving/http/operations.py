"""Routes for operators: metrics, whether requests are taken, and whether the process lives.

Whatever a scraper says it accepts, it gets text 0.0.4: later formats rename what dashboards look for.
"""

from __future__ import annotations

from outrider.runtime.core import errors
from outrider.runtime.serving.http.responses import answer
from outrider.runtime.serving.http.routes import HttpRoute
from outrider.runtime.serving.readiness import ServerState
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send


def operations_routes(readiness: ServerState, collector: Collector) -> list[HttpRoute]:
    """Return the routes.

    Args:
        readiness: of the server.
        collector: of the metrics.
    """

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        kind = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())
        await answer(generate_latest(collector), send, headers=(kind,))

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        if readiness.is_serving:
            await answer(b"", send, headers=())
            return
        if readiness.is_open:
            readiness.handler.check_open()
            raise errors.Draining if readiness.serving.worker.is_ready else errors.EngineRestart
        raise errors.NotReady(readiness.stage)

    async def live(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(b"", send, headers=())

    return [
        HttpRoute(path="/metrics", scope="metrics", app=metrics),
        HttpRoute(path="/health", scope="info", app=health, is_probe=True),
        HttpRoute(path="/live", scope="info", app=live, is_probe=True),
    ]
