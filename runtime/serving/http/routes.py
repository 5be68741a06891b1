"""What a listener answers: each route with the scope that a caller needs, and errors by the table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.runtime.serving.http.responses import answer_error
from outrider.runtime.serving.v1.responses import failure_of
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """One route of a protocol.

    Attributes:
        method: GET or POST; HEAD is as GET.
        path: of the target; what it ends with may be a name, "/v1/models/{name:path}".
        scope: that a caller needs.
        app: answers, behind the gate.
        is_probe: whether it is answered to anybody, where probes are: load balancers, and browsers that open a page,
            have no credentials.
    """

    path: str
    scope: str
    app: Application
    method: str = "GET"
    is_probe: bool = False

    @property
    def prefix(self) -> str:
        """What the path begins with where it ends with a name; else empty."""
        begin, is_named, _ = self.path.partition("{")
        return begin if is_named else ""

    def takes(self, path: str) -> bool:
        """Return whether a path is the route's."""
        return path == self.path if not self.prefix else path.startswith(self.prefix)


def router(routes: Sequence[HttpRoute]) -> Router:
    """Return the application of all routes; the gate before it knows every path and method."""
    found = [Route(one.path, _Answered(one.app), methods=[one.method]) for one in routes]
    return Router(found, redirect_slashes=False)


class _Answered:
    """An application whose errors are answered by the table."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
            return
        except ClientDisconnect:
            return
        except Exception as error:
            failure = failure_of(scope["path"], error)
        await answer_error(failure, send)
