"""Settings of a server's security: files, and what is allowed without them."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import Panel, setting

Network = IPv4Network | IPv6Network

_MOST_RELOAD_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Where the certificate and what belongs to it lie.

    Attributes:
        chain: PEM, the server's certificate first.
        key: PEM, without a passphrase.
        client_ca: PEM; clients must have a certificate that these have signed. None asks for none.
    """

    chain: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (self.chain, self.key, *(() if self.client_ca is None else (self.client_ca,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Who is let in, and how; the help of each setting says what it is."""

    tls_certificate: Path | None = setting(
        None, Panel.SECURITY, "Certificate of the server, PEM; without one there is no TLS."
    )
    tls_key: Path | None = setting(None, Panel.SECURITY, "Key of the certificate, PEM.")
    tls_client_ca: Path | None = setting(
        None, Panel.SECURITY, "Authorities, PEM: clients need a certificate by one of them."
    )
    keys: Path | None = setting(None, Panel.SECURITY, "Hashes of API keys (outrider key new).")
    jwt_keys: Path | None = setting(
        None, Panel.SECURITY, "JSON web key set of who signs tokens; without one none are taken."
    )
    jwt_audience: str | None = setting(None, Panel.SECURITY, "Audience that tokens must be for.")
    jwt_tenant_claim: str = setting("sub", Panel.SECURITY, "Claim of tokens that is the tenant.")
    tenants: Path | None = setting(
        None, Panel.SECURITY, "Shares and certificates of tenants, TOML."
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        Panel.SECURITY,
        "Addresses and networks, with commas, whose connections share no places.",
        offered=None,
    )
    is_insecure: bool = setting(
        False,
        Panel.ADDRESSES,
        "Listen for other machines without TLS.",
        option="insecure",
        flags=("--insecure",),
    )
    has_open_health: bool = setting(
        True, Panel.SECURITY, "Tell health to callers without credentials.", option="open_health"
    )
    reload_every_s: float = setting(
        10.0, Panel.SECURITY, "Seconds between two looks at these files."
    )

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_key", "must be given with tls_certificate, and that with it")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca", "must be given with tls_certificate")
        if self.jwt_keys is not None and not self.jwt_audience:
            raise ConfigError("jwt_audience", "must be given with jwt_keys")
        if self.jwt_audience is not None and self.jwt_keys is None:
            raise ConfigError("jwt_keys", "must be given with jwt_audience")
        try:
            _ = self.proxies
        except ValueError:
            raise ConfigError(
                "trusted_proxies", "must be addresses or networks, such as 10.0.0.0/8"
            ) from None
        if not 0 < self.reload_every_s <= _MOST_RELOAD_S:
            raise ConfigError(
                "reload_every_s", f"must be above 0, and at most {_MOST_RELOAD_S:.0f}"
            )

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The networks of ``trusted_proxies``."""
        return tuple(ip_network(one.strip(), strict=False) for one in self.trusted_proxies)

    @property
    def certificate_files(self) -> CertificateFiles | None:
        """The certificate's files; None without TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return CertificateFiles(
            chain=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca
        )
