"""What a listener answers: each route with the scope that a caller needs, and errors by the table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from outrider.runtime.serving.http.responses import answer_error
from outrider.runtime.serving.v1.responses import failure_of
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """One route of a protocol.

    Attributes:
        method: GET or POST; HEAD is as GET.
        path: of the target.
        scope: that a caller needs.
        app: answers, behind the gate.
        is_probe: whether it is answered to anybody, where probes are: load balancers, and browsers that open a page,
            have no credentials.
        has_name: whether a name follows the path.
    """

    path: str
    scope: str
    app: Application
    method: str = "GET"
    is_probe: bool = False
    has_name: bool = False

    def takes(self, path: str) -> bool:
        """Return whether a path is the route's."""
        return path.startswith(self.path) if self.has_name else path == self.path

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer; its errors are answered by the table."""
        try:
            await self.app(scope, receive, send)
            return
        except ClientDisconnect:
            return
        except Exception as error:
            failure = failure_of(scope["path"], error)
        await answer_error(failure, send)
