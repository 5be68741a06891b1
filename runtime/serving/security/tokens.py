"""JSON web tokens: checked against the public keys of a local key set; nothing is ever fetched.

Every key has one algorithm, its own: ES256, RS256 or EdDSA. What a token says of its algorithm is compared with that
and decides nothing. A token needs ``exp``, ``aud`` and ``sub``; ``scope`` (words) narrows what it may do.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import NAME, SCOPES
from outrider.runtime.serving.security.tenants import CALLER_SCOPES

if TYPE_CHECKING:
    from jwt import PyJWK

OPTION = "jwt_keys"
ALGORITHMS = ("ES256", "RS256", "EdDSA")
LEEWAY_S = 10
"""By which clocks of issuers may differ from ours."""
MOST_REMEMBERED = 4096
"""Valid tokens; when there are more, all are forgotten."""
_LEAST_RSA_BITS = 2048
_MOST_SUBJECT = 256
_PRIVATE = ("d", "p", "q", "dp", "dq", "qi", "k")


@dataclass(frozen=True, slots=True)
class Claims:
    """What a valid token says.

    Attributes:
        subject: who it was given to.
        tenant: whose requests his are.
        scopes: what he may do.
    """

    subject: str
    tenant: str
    scopes: frozenset[str]


class TokenKeys:
    """The public keys of those who may sign tokens.

    Args:
        keys: by ``kid``; a single one may have the id "".
        audience: that tokens must be for.
        tenant_claim: name of the claim that holds the tenant.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        keys: Mapping[str, PyJWK],
        *,
        audience: str,
        tenant_claim: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._audience = audience
        self._tenant_claim = tenant_claim
        self._clock = clock
        # Claims and end of tokens that were found valid, by their hashes.
        self._known: dict[bytes, tuple[Claims, int]] = {}

    def claims(self, token: str) -> Claims | None:
        """Return what a token says; None where it is not valid now, or says nothing usable.

        A token that is found valid is remembered until it ends: to check one takes 0.12 ms (ES256), of each request.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        payload = self._checked(token)
        found = None if payload is None else self._claims(payload)
        if payload is not None and found is not None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[digest] = (found, int(payload["exp"]))
        return found

    def _checked(self, token: str) -> Mapping[str, Any] | None:
        """Return the payload of a token whose signature, times and audience are right."""
        import jwt

        try:
            name = jwt.get_unverified_header(token).get("kid", "")
            key = self._keys.get(name) if isinstance(name, str) else None
            if key is None:
                return None
            payload: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "sub"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            # The library raises its own errors; the others are for claims of absurd types.
            return None
        return payload

    def _claims(self, payload: Mapping[str, Any]) -> Claims | None:
        subject, tenant = payload["sub"], payload.get(self._tenant_claim)
        if not isinstance(subject, str) or not subject.isprintable():
            return None
        if not 0 < len(subject) <= _MOST_SUBJECT:
            return None
        if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
            return None
        words = payload.get("scope")
        if words is None:
            return Claims(subject, tenant, CALLER_SCOPES)
        scopes = words.split() if isinstance(words, str) else ()
        return Claims(subject, tenant, frozenset(SCOPES).intersection(scopes))


def parse_key_set(text: str) -> dict[str, PyJWK]:
    """Return the keys of a JSON web key set by their ids.

    Raises:
        ConfigError: it is no such set, or has a key that could not be trusted.
        ModuleNotFoundError: PyJWT or cryptography is not installed.
    """
    try:
        entries = json.loads(text)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(OPTION, "must be JSON with a list named keys") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(OPTION, "must be JSON with a list named keys")
    keys: dict[str, PyJWK] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"{OPTION}, key {number}"
        key = _parse_key(where, entry)
        name = entry.get("kid", "")
        if not isinstance(name, str) or name in keys or (not name and len(entries) > 1):
            raise ConfigError(where, "must have a kid of its own")
        keys[name] = key
    return keys


def _parse_key(where: str, entry: object) -> PyJWK:
    import cryptography  # noqa: F401  (without it the library knows none of the algorithms)
    import jwt
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if not isinstance(entry, dict) or any(name in entry for name in _PRIVATE):
        raise ConfigError(where, "must be a public key, without private parts")
    try:
        key = jwt.PyJWK.from_dict(entry)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, NotImplementedError):
        # The library's words have the key itself in them.
        raise ConfigError(where, f"must be a key for {', '.join(ALGORITHMS)}") from None
    if key.algorithm_name not in ALGORITHMS:
        raise ConfigError(where, f"must be a key for {', '.join(ALGORITHMS)}")
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _LEAST_RSA_BITS:
        raise ConfigError(where, f"must have at least {_LEAST_RSA_BITS} bits")
    return key
