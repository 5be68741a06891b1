"""Whose request it is: a name in the call's metadata, until there is authentication to say.

What drafters learn, and the caller's ids for requests, are kept apart by tenant. The name is taken
on trust, so whatever stands between callers and server must set it; without one, all callers are
the one tenant "".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from outrider.runtime.core.errors import RequestError

TENANT_KEY = "outrider-tenant"
"""Key of the metadata."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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
