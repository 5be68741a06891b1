"""How a client proves who it is: TLS of its channel, a certificate of its own, a key with every call.

Over TLS the key belongs to the channel's credentials, so that gRPC sends it with its own health checks, too. gRPC
refuses that over plain text: there the key is metadata of each call, and health checks, which carry none, are off.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, Unpack

import grpc

PemFile: TypeAlias = str | os.PathLike[str]
"""Path of a file of certificates, or of a key, in PEM."""

_KEY = re.compile(r"[!-~]+")
_LOCAL_SCHEMES = ("unix", "unix-abstract")
# A key over plain text: it must not take the way through a proxy, and with closed health, gRPC's own checks, which
# carry no metadata, would never find the server well.
_PLAIN_TEXT_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.inhibit_health_checking", 1))


class Secret(str):
    """A text that nothing shows by accident: logs and tracebacks with variables have its ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a channel is opened with, and what goes with each of its calls.

    Attributes:
        credentials: of the channel; None is plain text.
        metadata: of every call.
        options: of the channel.
    """

    credentials: grpc.ChannelCredentials | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    options: tuple[tuple[str, str | int], ...] = ()


class AccessOptions(TypedDict, total=False):
    """How a client proves who it is; what is left out is as None, or False.

    Attributes:
        credentials: of the channel, where the files below do not say them; None is plain text.
        api_key: key or JSON Web Token that is sent with every call, and with gRPC's health checks over TLS.
        tls_ca: file of the authorities that may have signed the server's certificate, PEM; turns TLS on.
        tls_certificate: file of the client's own certificate, PEM, for servers that ask for one; with ``tls_key``.
        tls_key: file of its private key.
        allow_insecure: whether the key may be sent in plain text to another machine.
    """

    credentials: grpc.ChannelCredentials | None
    api_key: str | None
    tls_ca: PemFile | None
    tls_certificate: PemFile | None
    tls_key: PemFile | None
    allow_insecure: bool


def open_access(address: str, **options: Unpack[AccessOptions]) -> Access:
    """Return how to call a server.

    Raises:
        TypeError: there is no such option.
        ValueError: a file does not hold what it must, arguments contradict one another, or a key would be sent in plain
            text to another machine; names the argument and never its value.
        OSError: a file cannot be read.
    """
    if unknown := sorted(options.keys() - AccessOptions.__annotations__.keys()):
        raise TypeError(f"{unknown[0]}: is no option of a client")
    credentials, api_key = options.get("credentials"), options.get("api_key")
    tls_ca, tls_key = options.get("tls_ca"), options.get("tls_key")
    tls_certificate = options.get("tls_certificate")
    if tls_ca is not None or tls_certificate is not None or tls_key is not None:
        if credentials is not None:
            raise ValueError("credentials: not with tls_ca, tls_certificate or tls_key")
        credentials = _tls(tls_ca, tls_certificate, tls_key)
    if api_key is None:
        return Access(credentials=credentials)
    if not isinstance(api_key, str) or not _KEY.fullmatch(api_key):
        raise ValueError("api_key: must be printable ASCII letters without spaces")
    if credentials is not None:
        token = grpc.access_token_call_credentials(api_key)
        return Access(credentials=grpc.composite_channel_credentials(credentials, token))
    if not options.get("allow_insecure", False) and not is_local(address):
        raise ValueError(
            "api_key: goes over TLS or to this machine only: give tls_ca or credentials, or allow_insecure, "
            "with which whoever listens learns the key"
        )
    return Access(
        metadata={"authorization": Secret(f"Bearer {api_key}")}, options=_PLAIN_TEXT_OPTIONS
    )


def is_local(address: str) -> bool:
    """Return whether a gRPC target leads to this machine only, as far as its text says."""
    scheme, _, rest = address.partition(":")
    if scheme in _LOCAL_SCHEMES:
        return True
    if scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(one) for one in rest.split(","))
    return _is_loopback(re.sub(r"^dns:(///)?", "", address))


def _is_loopback(endpoint: str) -> bool:
    """Return whether HOST, HOST:PORT or [HOST]:PORT is of the loopback."""
    found = re.fullmatch(r"\[([^\]]*)\](?::\d+)?|([^:]*):[^:]*|(.*)", endpoint)
    host = "" if found is None else next(one for one in found.groups() if one is not None)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(
    ca: PemFile | None, certificate: PemFile | None, key: PemFile | None
) -> grpc.ChannelCredentials:
    """Return credentials of files that were checked: gRPC would say at the first call that it cannot connect."""
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate, tls_key: one needs the other")
    pems = [None if path is None else _read(path) for path in (ca, key, certificate)]
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            checked.load_verify_locations(os.fspath(ca))
        except ssl.SSLError as error:
            raise ValueError("tls_ca: must hold certificates in PEM") from error
    if certificate is not None and key is not None:
        try:
            checked.load_cert_chain(os.fspath(certificate), os.fspath(key), password=_no_password)
        except ssl.SSLError as error:
            rule = "must be a certificate in PEM and the key that fits it"
            raise ValueError(f"tls_certificate, tls_key: {rule}") from error
    return grpc.ssl_channel_credentials(*pems)


def _no_password() -> str:
    raise ValueError("tls_key: must be without a passphrase")


def _read(path: PemFile) -> bytes:
    with open(path, "rb") as file:
        return file.read()
