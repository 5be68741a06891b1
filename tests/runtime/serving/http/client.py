"""A server of letters with the HTTP listener beside gRPC, and a client without a library."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from outrider.runtime.serving.http.factory import PortListener, open_api
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.conftest import ANY_LIMITS, ENDS_AT_ONCE, Running


@dataclass(frozen=True)
class Answer:
    """What a request was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json()["error"]
        return found

    def events(self) -> list[Any]:
        """Data of the events, those of JSON parsed."""
        lines = [one for one in self.body.decode().split("\n\n") if one.startswith("data: ")]
        data = [one.removeprefix("data: ") for one in lines]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


@dataclass(frozen=True)
class Http:
    """Sends requests to a server."""

    running: Running
    port: int

    async def ask(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """Send a request, with a body of JSON unless it is bytes already."""
        return await asyncio.to_thread(self._ask, path, body, method, headers)

    def _ask(self, path: str, body: Any, method: str | None, headers: dict[str, str]) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            verb = method or ("GET" if body is None else "POST")
            connection.request(verb, path, data, named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    async def complete(self, **fields: Any) -> Answer:
        return await self.ask("/v1/completions", fields)

    async def chat(self, **fields: Any) -> Answer:
        return await self.ask("/v1/chat/completions", fields)


@contextlib.asynccontextmanager
async def serving_http(
    start: Callable[..., AbstractAsyncContextManager[Running]],
    address: str = "127.0.0.1:0",
    **options: Any,
) -> AsyncIterator[Http]:
    """A server that ``start`` makes with options, with HTTP beside gRPC."""
    made: list[PortListener] = []

    def listeners(readiness: ServerState, security: Security) -> list[PortListener]:
        limits, config = options.get("limits", ANY_LIMITS), options.get("config", ENDS_AT_ONCE)
        if "stall_timeout_s" in options:
            config = replace(config, stall_timeout_s=options["stall_timeout_s"])
        asked = ServeOptions(http_address=address, limits=limits, config=config)
        found = open_api(readiness, security, asked)
        assert found is not None
        made.append(found)
        return made

    async with start(listeners=listeners, **options) as running:
        yield Http(running, made[0].port)
