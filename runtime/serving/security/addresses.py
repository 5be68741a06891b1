"""Addresses to listen on: which of them other machines reach, and sockets that only their owner may open."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import is_loopback

UNIX = "unix:"
_MOST_SOCKET_PATH = 107
"""Bytes; Linux has room for no more."""
_OWNER_ONLY = 0o600


def tcp_address(host: str, port: int) -> str:
    """Return host and port as one address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(key: str, address: str) -> tuple[str, int]:
    """Return host and port of an address "HOST:PORT".

    Raises:
        ConfigError: it is none; ``key`` is the option that gave it.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise ConfigError(key, "must be HOST:PORT or unix:PATH")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_reachable(address: str) -> bool:
    """Return whether other machines may reach an address, "HOST:PORT" or "unix:PATH"."""
    if address.startswith(UNIX):
        return False
    host = address.rpartition(":")[0].strip("[]")
    return host != "localhost" and not is_loopback(host)


def check_exposed(key: str, address: str, *, has_tls: bool, is_insecure: bool) -> None:
    """Refuse an address that others reach without TLS, unless that is asked for by name.

    Raises:
        ConfigError: it is one; ``key`` is the option that gave it.
    """
    if is_reachable(address) and not has_tls and not is_insecure:
        rule = "is reachable from other machines and needs tls_certificate and tls_key"
        raise ConfigError(key, f"{rule}; --insecure listens without TLS all the same")


def prepare_socket(key: str, path: Path) -> None:
    """Make way for a Unix socket: what an ended server has left is removed.

    Raises:
        ConfigError: something else is there, or a server still listens, whose socket gRPC would take over silently.
    """
    if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
        raise ConfigError(key, f"must be a path of at most {_MOST_SOCKET_PATH} bytes")
    if not path.parent.is_dir():
        raise ConfigError(key, "must be in a folder that exists")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode) or _is_listening(path):
        raise ConfigError(key, "must be free to bind")
    path.unlink()


@contextmanager
def owners_sockets() -> Iterator[None]:
    """Have sockets that are bound meanwhile be their owner's alone, from the first moment on."""
    before = os.umask(0o777 & ~_OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(before)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
