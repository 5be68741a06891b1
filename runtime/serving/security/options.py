"""Options of a server's security: files, and what is allowed without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.certificate import CertificateFiles

_MOST_RELOAD_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Who is let in, and how.

    Attributes:
        keys: file of hashes of API keys; None for none.
        jwt_keys: file of a JSON web key set; None where tokens are not taken.
        jwt_audience: that tokens must be for; set with ``jwt_keys``.
        jwt_tenant_claim: of tokens, the claim that holds the tenant.
        tenants: file of tenants; None for none.
        tls_certificate: file of the server's certificate, in PEM; None for no TLS.
        tls_key: file of its key; set with ``tls_certificate``.
        tls_client_ca: file of those whose certificates clients must have; None where they need none.
        is_insecure: whether other machines may connect without TLS.
        has_open_health: whether health is told to callers without credentials.
        reload_every_s: seconds between two looks at the files.
    """

    keys: Path | None = None
    jwt_keys: Path | None = None
    jwt_audience: str | None = None
    jwt_tenant_claim: str = "sub"
    tenants: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    is_insecure: bool = False
    has_open_health: bool = True
    reload_every_s: float = 10.0

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_key", "must be given with tls_certificate, and that with it")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca", "must be given with tls_certificate")
        if self.jwt_keys is not None and not self.jwt_audience:
            raise ConfigError("jwt_audience", "must be given with jwt_keys")
        if self.jwt_audience is not None and self.jwt_keys is None:
            raise ConfigError("jwt_keys", "must be given with jwt_audience")
        if not 0 < self.reload_every_s <= _MOST_RELOAD_S:
            raise ConfigError(
                "reload_every_s", f"must be above 0, and at most {_MOST_RELOAD_S:.0f}"
            )

    @property
    def certificate_files(self) -> CertificateFiles | None:
        """The certificate's files; None without TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return CertificateFiles(
            chain=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca
        )
