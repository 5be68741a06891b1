"""Who sent a request, behind the gate and before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.runtime.core.tenant import Identity, is_local
from outrider.runtime.serving.observability.tracing import trace_headers
from outrider.runtime.serving.requests.client import ClientIdentity
from starlette.types import Scope

PROTOCOL = "openai"


def identity_of(scope: Scope) -> Identity:
    """Return who sent the request; behind the gate only."""
    identity: Identity = scope["state"]["identity"]
    return identity


def peer_of(scope: Mapping[str, Any]) -> str:
    """Return a caller's address as gRPC spells it; empty where he has gone away already."""
    if scope["client"] is None:
        return ""
    host, port = scope["client"]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def values_of(scope: Scope, name: str) -> list[str]:
    """Return the values of all headers of a name."""
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1") for key, value in headers if key == name.encode()]


def caller_of(scope: Scope) -> ClientIdentity:
    """Return who asks. Who has proven nothing is known only where he is on this machine."""
    identity, peer = identity_of(scope), peer_of(scope)
    return ClientIdentity(
        tenant=identity.tenant,
        is_known=bool(identity.key) or is_local(peer),
        rules=identity.rules,
        key=identity.key,
        peer=peer,
        protocol=PROTOCOL,
        method=f"{scope['method']} {scope['path']}",
        trace=trace_headers(
            (key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]
        ),
    )
