"""The one gate of a server: who calls, whether he may, and a note of each call that is refused.

gRPC's interceptor (``grpc_gate``) and the HTTP listeners (``runtime.serving.http.gate``) ask it before every method and
every route. Each protocol declares the scope of its own methods; what has none is allowed to nobody.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from outrider.runtime.core import errors
from outrider.runtime.core.tenant import TENANT_KEY, Identity, is_local, tenant_of
from outrider.runtime.serving.observability.logs import bounded
from outrider.runtime.serving.security.authenticator import (
    Authenticator,
    PresentedCredentials,
    check_scope,
    sole_header,
)

Refused: TypeAlias = Callable[[str, str, errors.ServingError, Identity | None], None]
"""Told of each refused call: what was called, peer, error, and who it was, if that is known."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingCall:
    """What a transport knows of a call before anybody looks at its body.

    Attributes:
        name: method or route, as callers name it.
        scope: that it needs; None is what nobody may do.
        peer: address of the caller, as gRPC spells it.
        authorization: values of the header of that name.
        tenants: values of the header that names a tenant.
        certificate_names: subject alternative names of the caller's certificate, as a function: it is asked where
            credentials are.
        needs_scope: False of a method that does not exist: who is let in is told so.
        is_open: whether it is answered to anybody.
    """

    name: str
    scope: str | None
    peer: str
    authorization: Sequence[str | bytes] = field(repr=False)
    tenants: Sequence[str | bytes]
    certificate_names: Callable[[], Sequence[str]] = tuple
    needs_scope: bool = True
    is_open: bool = False


class Gate:
    """Lets calls through whose callers are known and may make them.

    Args:
        authenticator: to ask.
        refused: called for each call that is refused.
        let_in: called with the peer of each call that is let in, open ones left out.
        left: called with the peer when such a call has ended.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        refused: Refused,
        let_in: Callable[[str], None] = lambda peer: None,
        left: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self.authenticator = authenticator
        self._refused = refused
        self._let_in = let_in
        self.left = left

    def admit(self, call: IncomingCall, check: Callable[[], None] | None = None) -> Identity:
        """Return who calls; nobody in particular where the call is open.

        Args:
            call: to judge.
            check: of the transport's own, before all others; raises ``ServingError``.

        Raises:
            ServingError: he is not let in.
        """
        found: Identity | None = None
        try:
            if check is not None:
                check()
            if call.is_open:
                return Identity()
            found = self._identify(call)
            if call.needs_scope:
                check_scope(found, call.scope)
            self._let_in(call.peer)
            return found
        except errors.ServingError as error:
            failure = error
        except Exception as error:
            # Its text may have a secret in it: neither the caller nor the log gets it.
            failure = errors.InternalError(uuid.uuid4().hex)
            name, kind = bounded(call.name), type(error).__name__
            log.error("%s: %s at the gate, error id %s", name, kind, failure.error_id)
        self._refused(call.name, call.peer, failure, found)
        raise failure

    def _identify(self, call: IncomingCall) -> Identity:
        authenticator, presented = self.authenticator, PresentedCredentials()
        if authenticator.asks:
            presented = PresentedCredentials(
                authorization=sole_header(call.authorization),
                certificate_names=tuple(call.certificate_names()),
            )
        found = authenticator.identify(presented)
        tenant = tenant_of((TENANT_KEY, one) for one in call.tenants)
        if not tenant:
            return found
        return authenticator.named(found, tenant, is_local=is_local(call.peer))
