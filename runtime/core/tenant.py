"""Whose request it is: a name in the call's metadata, until there is authentication to say.

What drafters learn, and the caller's ids for requests, are kept apart by tenant. The name is taken
on trust, so whatever stands between callers and server must set it; without one, all callers are
the one tenant "". Of these, only callers on this machine share what drafters learn: the others may be
anybody, and the speed of an answer hints at what was answered before.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from outrider.runtime.core.errors import RequestError

TENANT_KEY = "outrider-tenant"
"""Key of the metadata."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOCAL_SCHEMES = ("unix", "unix-abstract")


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


def is_known(tenant: str, peer: str) -> bool:
    """Return whether a caller may share with others of its tenant: it names one, or is on this machine.

    Args:
        tenant: as ``tenant_of`` returned it.
        peer: address of the caller as gRPC spells it, "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000" or "unix:PATH".
    """
    scheme, _, rest = peer.partition(":")
    if tenant or scheme in _LOCAL_SCHEMES:
        return True
    host = rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
