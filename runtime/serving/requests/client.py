"""Who asks: what a protocol knows of the client of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.runtime.core.tenant import NO_RULES, TenantRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """The client of a request.

    Attributes:
        tenant: whose request it is, as ``runtime.core.tenant`` reads it.
        is_known: whether that is certain enough to share anything within the tenant.
        remaining_s: seconds until the caller stops waiting; None where he does not say.
        rules: the tenant's share.
        key: what proved it, as of ``runtime.core.tenant.Identity``.
        peer: address of the caller, as gRPC spells it.
        protocol: that the request came in.
        method: of the protocol, as callers name it.
        is_counted: whether the request has been counted among the tenant's, before its body was parsed.
        trace: headers of ``runtime.serving.observability.tracing.TRACE_HEADERS`` that the request came with.
    """

    tenant: str = ""
    is_known: bool = True
    remaining_s: float | None = None
    rules: TenantRules = NO_RULES
    key: str = ""
    peer: str = ""
    protocol: str = "outrider.v1"
    method: str = "Generate"
    is_counted: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)


ANONYMOUS = ClientIdentity()
