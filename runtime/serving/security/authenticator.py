"""Who calls: from what a caller brings, his identity or a refusal that tells him nothing.

Knows no transport: ``gate`` asks it for gRPC and HTTP alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.runtime.core.errors import PermissionDenied, Unauthenticated
from outrider.runtime.core.tenant import SCOPES, TENANT_KEY, Identity
from outrider.runtime.serving.security.keys import Key, find_key
from outrider.runtime.serving.security.tenants import Tenants
from outrider.runtime.serving.security.tokens import TokenKeys

ALL_SCOPES = frozenset(SCOPES)
_MISMATCH = f"metadata {TENANT_KEY}: must be left out, or be the tenant of the credentials"
_NOT_BELIEVED = (
    f"metadata {TENANT_KEY}: believed of callers on the server's machine alone; leave it out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedCredentials:
    """What a caller brings.

    Attributes:
        authorization: the header of that name; empty for none.
        certificate_names: subject alternative names of his certificate, which a trusted authority has signed.
    """

    authorization: str = field(default="", repr=False)
    certificate_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What is asked for, as functions of no arguments, since files may change; None for what is not asked for.

    Attributes:
        keys: API keys by their hashes.
        tokens: public keys of those who sign tokens.
        has_certificates: whether callers' certificates say who they are.
    """

    keys: Callable[[], Mapping[bytes, Key]] | None = None
    tokens: Callable[[], TokenKeys] | None = None
    has_certificates: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody is asked for anything."""
        return self.keys is None and self.tokens is None and not self.has_certificates


class Authenticator:
    """Tells who calls. Its methods may be called from any thread.

    Args:
        credentials: to ask for.
        tenants: what is known of tenants, as a function.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        tenants: Callable[[], Tenants] = Tenants,
    ) -> None:
        self._credentials = credentials or Credentials()
        self._tenants = tenants
        self.asks = not self._credentials.is_empty

    def identify(self, presented: PresentedCredentials) -> Identity:
        """Return who calls.

        Where credentials are asked for, a header decides if there is one, else the certificate.

        Raises:
            Unauthenticated: his credentials are not valid, or there are none.
        """
        if not self.asks:
            return Identity(scopes=ALL_SCOPES, rules=self._tenants().rules_of(""))
        identity = self._proven(presented)
        if identity is None:
            raise Unauthenticated
        return identity

    def named(self, identity: Identity, tenant: str, *, is_local: bool) -> Identity:
        """Return the identity of a caller who says whose requests his are.

        Args:
            identity: as ``identify`` returned it.
            tenant: what he says; not empty.
            is_local: whether he is on this machine.

        Raises:
            PermissionDenied: nothing proves it.
        """
        if self.asks:
            if tenant != identity.tenant:
                raise PermissionDenied(_MISMATCH)
            return identity
        if not is_local:
            raise PermissionDenied(_NOT_BELIEVED)
        return replace(identity, tenant=tenant, rules=self._tenants().rules_of(tenant))

    def _proven(self, presented: PresentedCredentials) -> Identity | None:
        credentials, tenants = self._credentials, self._tenants()
        secret = _bearer(presented.authorization)
        # Asked even where there is none, so that a caller without a key waits as long as one with a wrong key.
        key = None if credentials.keys is None else find_key(credentials.keys(), secret)
        if key is not None:
            rules = tenants.rules_of(key.tenant)
            return Identity(
                tenant=key.tenant, key=f"key:{key.name}", scopes=key.scopes, rules=rules
            )
        if credentials.tokens is not None and secret:
            claims = credentials.tokens().claims(secret)
            if claims is not None:
                rules = tenants.rules_of(claims.tenant)
                name = f"jwt:{claims.subject}"
                return Identity(tenant=claims.tenant, key=name, scopes=claims.scopes, rules=rules)
        if presented.authorization or not credentials.has_certificates:
            return None
        return _by_certificate(presented.certificate_names, tenants)


def check_scope(identity: Identity, scope: str | None) -> None:
    """Refuse who may not do what needs a scope; None is what nobody may do.

    Raises:
        PermissionDenied: he may not.
    """
    if scope not in identity.scopes:
        raise PermissionDenied


def _by_certificate(names: tuple[str, ...], tenants: Tenants) -> Identity | None:
    found = tenants.of_certificate(names)
    if found is None:
        return None
    tenant, name = found
    scopes, rules = tenants.scopes[tenant], tenants.rules_of(tenant)
    return Identity(tenant=tenant, key=f"tls:{name}", scopes=scopes, rules=rules)


def sole_header(values: Sequence[str | bytes]) -> str:
    """Return a header's value; empty where there is none.

    Of several none counts: another server before this one may have looked at the first.
    """
    if not values:
        return ""
    value = values[0]
    return value if len(values) == 1 and isinstance(value, str) else "several"


def _bearer(authorization: str) -> str:
    """Return the secret of a header "Bearer SECRET"; empty for anything else."""
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
