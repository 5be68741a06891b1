"""The server's certificate: read and checked whole before gRPC sees it, and replaced while it is served.

gRPC takes any key and fails each handshake with one that it cannot use; so pairs that do not fit, kinds of key that its
TLS library does not sign with, and certificates that have ended are refused here.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.files import read_file
from outrider.runtime.serving.security.options import CertificateFiles

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_LEAST_RSA_BITS = 2048
# With P-521 and Ed25519 every handshake fails: BoringSSL does not offer them.
_CURVES = ("secp256r1", "secp384r1")


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A certificate and its key that fit.

    Attributes:
        chain: PEM.
        key: PEM.
        client_ca: PEM of those whose certificates clients must have; None where none are asked for.
        ends_s: when the first certificate of the chain to end does, seconds since 1970.
    """

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    ends_s: float

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return it as gRPC takes it."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.chain)], root_certificates=self.client_ca
        )


def read_certificate(files: CertificateFiles) -> ServerCertificate:
    """Return what the files hold.

    Raises:
        ConfigError: one cannot be used, or they do not belong together.
        ModuleNotFoundError: cryptography is not installed.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain = read_file("tls_certificate", files.chain)
    key = read_file("tls_key", files.key, is_secret=True)
    certificates = _certificates("tls_certificate", chain)
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError("tls_key", "must be a PEM key without a passphrase") from None
    is_known = (
        isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name in _CURVES
    ) or (isinstance(private, rsa.RSAPrivateKey) and private.key_size >= _LEAST_RSA_BITS)
    if not is_known:
        raise ConfigError("tls_key", f"must be RSA of {_LEAST_RSA_BITS} bits, P-256 or P-384")
    fits = False
    # A certificate of a kind that is unknown here has another key.
    with suppress(ValueError, UnsupportedAlgorithm):
        fits = private.public_key() == certificates[0].public_key()
    if not fits:
        raise ConfigError("tls_key", "must be the key of the certificate in tls_certificate")
    client_ca = None
    if files.client_ca is not None:
        client_ca = read_file("tls_client_ca", files.client_ca)
        _certificates("tls_client_ca", client_ca)
    ends_s = min(one.not_valid_after_utc.timestamp() for one in certificates)
    if ends_s <= time.time():
        raise ConfigError("tls_certificate", "must have no certificate that has ended")
    return ServerCertificate(chain, key, client_ca, ends_s)


def server_credentials(current: Callable[[], ServerCertificate]) -> grpc.ServerCredentials:
    """Return credentials of one address, whose handshakes take the certificate that is current when they begin."""
    last = current()

    def fetch() -> Any:
        """Return what is new since the last handshake; None for nothing. A thread of gRPC's calls it."""
        nonlocal last
        if current() is last:
            return None
        last = current()
        return last.configuration()

    return grpc.dynamic_ssl_server_credentials(
        last.configuration(), fetch, require_client_authentication=last.client_ca is not None
    )


def server_context(files: CertificateFiles, client_ca: bytes | None) -> ssl.SSLContext:
    """Return a context of Python's own library, which reads files only.

    Raises:
        OSError: they cannot be read, or do not fit.
        ValueError: likewise.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.chain, files.key)
    if client_ca is not None:
        # Between certificates there may be comments, in any language.
        context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _certificates(key: str, pem: bytes) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(key, "must be certificates in PEM") from None
