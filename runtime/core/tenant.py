"""Whose request it is: what credentials prove, or a name in the call's metadata.

What drafters learn, and the caller's ids for requests, are kept apart by tenant. Where a server asks for credentials
they say the tenant, and nothing else does. Where it asks for none, a name in the metadata is believed of callers on
this machine alone: whatever stands between callers and server must set it. Without a name all callers are the one
tenant "". Of these, only callers on this machine share what drafters learn: the others may be anybody, and the speed
of an answer hints at what was answered before.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.runtime.core.errors import RequestError

TENANT_KEY = "outrider-tenant"
"""Key of the metadata."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Of a tenant."""
_LOCAL_SCHEMES = ("unix", "unix-abstract")
PRIORITIES = (-100, 100)
"""The lowest and the highest that any request may ask for; lower goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRules:
    """A tenant's share of a server; None is no limit.

    Attributes:
        requests_per_s: requests that the tenant may begin, on average.
        burst_requests: requests at once, behind a pause; None for those of a second.
        tokens_per_s: tokens of prompts and answers together, on average.
        burst_tokens: likewise.
        max_slots: slots that the tenant's requests hold at once; those that want more wait.
        max_queued: requests of the tenant that wait at once.
        priorities: the lowest and the highest that its requests may ask for.
    """

    requests_per_s: float | None = None
    burst_requests: float | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    max_slots: int | None = None
    max_queued: int | None = None
    priorities: tuple[int, int] = PRIORITIES


NO_RULES = TenantRules()
"""Of a tenant that may have whatever there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a request's place among those who wait goes by.

    Attributes:
        tenant: whose request it is.
        priority: that it asks for; lower goes first.
        deadline_s: time on the worker's monotonic clock from which an answer is of no use; infinite for none.
        rules: the tenant's share.
    """

    tenant: str = ""
    priority: int = 0
    deadline_s: float = math.inf
    rules: TenantRules = NO_RULES


ANY_CLAIM = Claim()
"""A request that asks for nothing in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls, as far as a server that asks for credentials knows.

    Attributes:
        tenant: whose requests these are.
        key: what proved it, for logs: "key:NAME", "jwt:SUBJECT" or "tls:NAME"; empty where nobody was asked.
        scopes: what it may do, of ``SCOPES``.
        rules: the tenant's share.
    """

    tenant: str = ""
    key: str = ""
    scopes: frozenset[str] = frozenset()
    rules: TenantRules = NO_RULES


SCOPES = ("generate", "info", "metrics")
"""Generate, Abort and Tokenize; GetServerInfo, health and reflection; the admin listener."""


def tenant_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The tenant that a call names; "" where it names none.

    Raises:
        RequestError: it names an impossible one, or several.
    """
    names = [value for key, value in metadata if key == TENANT_KEY]
    if not names:
        return ""
    name = names[0]
    if len(names) > 1 or not isinstance(name, str) or not NAME.fullmatch(name):
        rule = "must be given once, as 1..128 characters of [A-Za-z0-9._:-]"
        raise RequestError(f"metadata {TENANT_KEY}", rule)
    return name


def is_local(peer: str) -> bool:
    """Return whether a caller is on this machine.

    Args:
        peer: address of the caller as gRPC spells it, "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000" or "unix:PATH".
    """
    scheme, _, rest = peer.partition(":")
    if scheme in _LOCAL_SCHEMES:
        return True
    return is_loopback(rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether a numeric address reaches this machine alone; False for anything else."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
