"""API keys: a file of their hashes, and which of them a caller presents.

A line is ``id:sha256:tenant:scopes``: the hash as 64 hex digits, scopes separated by commas. Empty lines and lines that
begin with # are skipped. A key is 256 random bits, so that a plain hash of it cannot be searched.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import NAME, SCOPES

OPTION = "keys"
PREFIX = "outrider_"
"""Of new keys: scanners for leaked secrets look for such."""
_KEY_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key: everything but the key.

    Attributes:
        name: its id, for logs.
        digest: its SHA-256, 32 bytes.
        tenant: whose requests those with the key are.
        scopes: what they may do, of ``SCOPES``.
    """

    name: str
    digest: bytes
    tenant: str
    scopes: frozenset[str]

    def line(self) -> str:
        """Return the key's line in a file of keys."""
        scopes = ",".join(scope for scope in SCOPES if scope in self.scopes)
        return f"{self.name}:{self.digest.hex()}:{self.tenant}:{scopes}"


def hash_key(text: str) -> bytes:
    """Return the SHA-256 of a presented key."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def find_key(keys: Mapping[bytes, Key], presented: str) -> Key | None:
    """Return the key that somebody presents; None for none of them, as for an empty text.

    It is looked up by its hash, so that neither the number of keys nor a likeness to one of them takes time: nobody
    can choose a text by the bits of its hash.
    """
    return keys.get(hash_key(presented))


def new_key(tenant: str, scopes: Iterable[str], name: str = "") -> tuple[str, Key]:
    """Return a new key and what a server has to know of it.

    Args:
        tenant: whose requests those with the key are.
        scopes: what they may do, of ``SCOPES``.
        name: for logs; a random one where it is empty.

    Raises:
        ConfigError: tenant, scopes or name are impossible.
    """
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    line = f"{name or secrets.token_hex(4)}:{hash_key(key).hex()}:{tenant}:{','.join(scopes)}"
    return key, _parse_line("key", line)


def parse_keys(text: str) -> Mapping[bytes, Key]:
    """Return the keys of a file by their hashes, in its order.

    Raises:
        ConfigError: a line is no key, or ids or keys repeat; it says the line's number.
    """
    keys: dict[bytes, Key] = {}
    names = set()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key = _parse_line(f"{OPTION}, line {number}", line)
        # Callers without a key present an empty one.
        if key.name in names or key.digest in keys or key.digest == hash_key(""):
            raise ConfigError(f"{OPTION}, line {number}", "must have an id and a key of its own")
        keys[key.digest] = key
        names.add(key.name)
    return keys


def parse_scopes(where: str, words: Iterable[str]) -> frozenset[str]:
    """Return scopes by their names.

    Raises:
        ConfigError: there are none, or unknown ones; it begins with ``where``.
    """
    scopes = frozenset(words)
    if not scopes or not scopes <= frozenset(SCOPES):
        raise ConfigError(where, f"scopes must be some of {', '.join(SCOPES)}")
    return scopes


def _parse_line(where: str, line: str) -> Key:
    # Names of tenants may have colons of their own.
    name, _, rest = line.partition(":")
    digest, _, rest = rest.partition(":")
    tenant, _, scopes = rest.rpartition(":")
    if not _ID.fullmatch(name):
        raise ConfigError(where, "must begin with an id, 1..64 characters of [A-Za-z0-9._-]")
    if not _HASH.fullmatch(digest):
        raise ConfigError(where, "must be id:sha256:tenant:scopes, the hash as 64 hex digits")
    if not NAME.fullmatch(tenant):
        raise ConfigError(where, "must name a tenant, 1..128 characters of [A-Za-z0-9._:-]")
    words = (word.strip() for word in scopes.split(","))
    return Key(name, bytes.fromhex(digest), tenant, parse_scopes(where, words))
