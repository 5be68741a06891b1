"""The one gate of the HTTP listener: before every route and every body, whatever is asked for.

It asks the same authenticator as gRPC's gate. A path or a method that ``SCOPE_OF`` does not know is allowed to nobody.
A browser sends credentials of its own accord never here, but it does reach ports of its machine: so other sites' pages
are refused (``origin``), and names that a stranger has pointed at this machine (``host``).
"""

from __future__ import annotations

import logging
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from outrider.runtime.core import errors
from outrider.runtime.core.tenant import TENANT_KEY, Identity, is_local, is_loopback, tenant_of
from outrider.runtime.serving.http.callers import peer_of, values_of
from outrider.runtime.serving.http.errors import NoSuchRoute, WrongMethod
from outrider.runtime.serving.http.responses import answer_error
from outrider.runtime.serving.security.authenticator import (
    Authenticator,
    PresentedCredentials,
    check_scope,
    sole_header,
)
from starlette.types import ASGIApp, Receive, Scope, Send

SCOPE_OF: Mapping[tuple[str, str], str] = {
    ("POST", "/v1/completions"): "generate",
    ("POST", "/v1/chat/completions"): "generate",
    ("POST", "/tokenize"): "generate",
    ("POST", "/detokenize"): "generate",
    ("GET", "/tokenizer_info"): "info",
    ("GET", "/v1/models"): "info",
    ("GET", "/health"): "info",
    ("GET", "/live"): "info",
    ("GET", "/metrics"): "metrics",
}
"""What a caller needs, by method and path; HEAD is as GET."""
PAGE_SCOPE = "info"
"""What a caller needs for the files of the page, where they are not answered to anybody."""
PROBES = frozenset((("GET", "/health"), ("GET", "/live")))
"""What load balancers call, who have no credentials."""

Refused: TypeAlias = Callable[[str, str, errors.ServingError, Identity | None], None]
"""Told of each refused call: what was called, peer, error, and who it was, if that is known."""

log = logging.getLogger(__name__)


class Gate:
    """Lets requests through whose callers are known and may make them; ``callers`` tells a handler who calls.

    Args:
        app: behind the gate.
        authenticator: to ask.
        pages: further paths for GET, of files that hold no data: a browser sends no key with a page that it opens.
        has_open_health: whether ``PROBES`` and ``pages`` are answered to anybody.
        is_reachable: whether other machines may connect.
        refused: called for each request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        *,
        pages: Sequence[str] = (),
        has_open_health: bool,
        is_reachable: bool,
        refused: Refused,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._scope_of = {**SCOPE_OF, **{("GET", path): PAGE_SCOPE for path in pages}}
        self._paths = {path for _, path in self._scope_of}
        self._open = {*PROBES, *(("GET", path) for path in pages)} if has_open_health else set()
        self._has_own_names = not is_reachable and not authenticator.asks
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        if scope["type"] != "http":
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = (method, scope["path"])
        found: Identity | None = None
        try:
            if self._has_own_names:
                _check_host(values_of(scope, "host"))
            _check_origin(values_of(scope, "origin"), values_of(scope, "host"))
            if route not in self._open:
                found = self._identify(scope)
                if route not in self._scope_of:
                    raise WrongMethod if scope["path"] in self._paths else NoSuchRoute
                check_scope(found, self._scope_of[route])
        except errors.ServingError as error:
            failure = error
        except Exception as error:
            # A log would keep its text, which may have a secret in it.
            failure = errors.InternalError(uuid.uuid4().hex)
            log.error("%s at HTTP's gate, error id %s", type(error).__name__, failure.error_id)
        else:
            scope["state"]["identity"] = found
            await self._app(scope, receive, send)
            return
        if not isinstance(failure, (NoSuchRoute, WrongMethod)):
            # Callers choose the names of routes that do not exist.
            name = " ".join(route) if route in self._scope_of else "unknown"
            self._refused(name, peer_of(scope), failure, found)
        await answer_error(failure, send)

    def _identify(self, scope: Scope) -> Identity:
        authenticator = self._authenticator
        presented = PresentedCredentials()
        if authenticator.asks:
            presented = PresentedCredentials(
                authorization=sole_header(values_of(scope, "authorization"))
            )
        found = authenticator.identify(presented)
        tenant = tenant_of((TENANT_KEY, one) for one in values_of(scope, TENANT_KEY))
        if not tenant:
            return found
        return authenticator.named(found, tenant, is_local=is_local(peer_of(scope)))


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
