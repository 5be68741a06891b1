"""Papers for tests: an authority and its certificates, files of keys, and tokens with the keys to check them."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.keys import new_key
from outrider.runtime.serving.security.options import SecurityOptions

AUDIENCE = "outrider-tests"


def pem_of(key: Any, password: bytes | None = None) -> bytes:
    """A private key in PEM."""
    how = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


class Authority:
    """Signs certificates, as few as a test needs."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key, days=1)
        certificate = builder.add_extension(basic, critical=True).sign(self._key, hashes.SHA256())
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)

    def certificate(self, *names: str, key: Any = None, days: int = 1) -> tuple[bytes, bytes]:
        """A certificate for DNS names and URIs, which ends in so many days, and its key, both in PEM."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
        alternatives = [
            x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
            for name in names
        ]
        builder = self._builder(subject, key, days=days).add_extension(
            x509.SubjectAlternativeName(alternatives), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), pem_of(key)

    def _builder(self, subject: x509.Name, key: Any, *, days: int) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=3))
            .not_valid_after(now + timedelta(days=days))
        )


def write(path: Path, data: bytes | str, mode: int = 0o600) -> Path:
    """Write a file in one go, as those who rotate secrets do, for its owner alone."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(data.encode() if isinstance(data, str) else data)
    fresh.chmod(mode)
    return fresh.replace(path)


def write_keys(path: Path, **scopes_by_tenant: str) -> dict[str, str]:
    """Write a file with a key per tenant, of scopes by commas; return the keys."""
    made = {
        tenant: new_key(tenant, scopes.split(","), name=f"key-of-{tenant}")
        for tenant, scopes in scopes_by_tenant.items()
    }
    write(path, "\n".join(["# tests", "", *(known.line() for _, known in made.values())]))
    return {tenant: secret for tenant, (secret, _) in made.items()}


def bearer(secret: str) -> dict[str, str]:
    """Metadata of a caller with a key or a token."""
    return {"authorization": f"Bearer {secret}"}


def key_security(folder: Path, **options: Any) -> tuple[Security, dict[str, str]]:
    """Security that asks for keys, and a key each of the tenants x, y and "scraper"."""
    path = folder / "keys"
    keys = write_keys(path, x="generate,info", y="generate,info", scraper="metrics")
    return Security(SecurityOptions(keys=path, **options)), keys


class Issuer:
    """Signs tokens by one key."""

    def __init__(self, algorithm: str, kid: str = "") -> None:
        self.algorithm, self.kid = algorithm, kid
        self.key: Any = {
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }[algorithm]()

    def entry(self, **changes: Any) -> dict[str, Any]:
        """The public key as an entry of a key set; None takes a member away."""
        kind = jwt.get_algorithm_by_name(self.algorithm)
        entry = {**kind.to_jwk(self.key.public_key(), as_dict=True), "kid": self.kid, **changes}
        return {name: value for name, value in entry.items() if value is not None}

    def token(self, headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """A token that is good for a minute, with claims changed; None takes one away."""
        claims = {"sub": "alice", "aud": AUDIENCE, "exp": time.time() + 60, **changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        headers = {"kid": self.kid} if headers is None else headers
        return jwt.encode(claims, self.key, algorithm=self.algorithm, headers=headers)


def key_set(*issuers: Issuer) -> str:
    """A JSON web key set of issuers."""
    return json.dumps({"keys": [one.entry() for one in issuers]})
