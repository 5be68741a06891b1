"""The gate of an HTTP listener: before every route and every body, whatever is asked for.

A path or a method that no route has is allowed to nobody. A browser never sends credentials here of its own accord, but
it does reach ports of its machine: so other sites' pages are refused (``origin``), and names that a stranger has
pointed at this machine (``host``).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

from outrider.runtime.core import errors
from outrider.runtime.core.tenant import TENANT_KEY, is_loopback
from outrider.runtime.serving.http.callers import peer_of, values_of
from outrider.runtime.serving.http.errors import NoSuchRoute, WrongMethod
from outrider.runtime.serving.http.responses import answer_error
from outrider.runtime.serving.http.routes import HttpRoute
from outrider.runtime.serving.security.gate import Gate, IncomingCall
from starlette.types import Receive, Scope, Send


class HttpGate:
    """Lets requests through whose callers are known and may make them; ``callers`` tells a handler who calls.

    Args:
        gate: to ask.
        routes: behind it.
        has_open_health: whether probes are answered to anybody.
        is_loopback_only: whether only this machine connects, so that a name which is not its own is a stranger's.
    """

    def __init__(
        self,
        gate: Gate,
        routes: Sequence[HttpRoute],
        *,
        has_open_health: bool,
        is_loopback_only: bool,
    ) -> None:
        self._gate = gate
        self._routes = tuple(routes)
        self._has_open_health = has_open_health
        self._is_loopback_only = is_loopback_only and not gate.authenticator.asks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have its route answer it."""
        if scope["type"] != "http":
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        there = [one for one in self._routes if one.takes(scope["path"])]
        route = next((one for one in there if one.method == method), None)
        is_open = self._has_open_health and route is not None and route.is_probe
        is_let_in = False
        try:
            self._admit(scope, route, is_open=is_open)
            is_let_in = not is_open
            if route is None:
                raise WrongMethod if there else NoSuchRoute(one.path for one in self._routes)
            await route.answer(scope, receive, send)
        except errors.ServingError as error:
            await answer_error(error, send)
        finally:
            if is_let_in:
                self._gate.left(peer_of(scope))

    def _admit(self, scope: Scope, route: HttpRoute | None, *, is_open: bool) -> None:
        """Note who calls.

        Raises:
            ServingError: he is not let in.
        """
        call = IncomingCall(
            # Callers choose the names of routes that do not exist.
            name="unknown" if route is None else f"{route.method} {route.path}",
            scope=None if route is None else route.scope,
            peer=peer_of(scope),
            authorization=values_of(scope, "authorization"),
            tenants=values_of(scope, TENANT_KEY),
            certificate_names=scope["state"].get("certificate_names", tuple),
            needs_scope=route is not None,
            is_open=is_open,
        )
        scope["state"]["identity"] = self._gate.admit(call, lambda: self._check_names(scope))

    def _check_names(self, scope: Scope) -> None:
        hosts = values_of(scope, "host")
        if self._is_loopback_only:
            _check_host(hosts)
        _check_origin(values_of(scope, "origin"), hosts)


def _check_host(hosts: Sequence[str]) -> None:
    """Refuse a name of this machine that is not its own: a page may have been loaded by it."""
    name = _parts(f"//{hosts[0]}").hostname if len(hosts) == 1 else None
    if name is None or not (name == "localhost" or is_loopback(name)):
        raise errors.PermissionDenied("host: must be localhost or a loopback address here")


def _check_origin(origins: Sequence[str], hosts: Sequence[str]) -> None:
    """Refuse requests that a browser sends for another site's page."""
    if origins and (len(origins) > 1 or _parts(origins[0]).netloc not in hosts):
        raise errors.PermissionDenied("origin: pages of other sites may not call this server")


def _parts(address: str) -> urllib.parse.SplitResult:
    """Return the parts of an address; all are empty where it is none."""
    try:
        return urllib.parse.urlsplit(address)
    except ValueError:
        return urllib.parse.SplitResult("", "", "", "", "")
