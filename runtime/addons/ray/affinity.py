"""Which replica a request goes to, so that those of one session, or with one prefix, find what was computed before.

Rendezvous hashing: every replica has a weight for every key, and the key's requests go to the heaviest. A replica that
comes or goes moves only its own keys, and every proxy finds the same order without asking anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

PREFIX_KEY = "outrider-prefix"
"""Key of the metadata in which clients send a hash of what a prompt begins with (``outrider.affinity_metadata``)."""


def key_of(session: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return what a request's replica is chosen by: its session, else its prefix; empty for neither."""
    if session:
        return f"session:{session}"
    prefixes = [value for name, value in metadata if name == PREFIX_KEY and isinstance(value, str)]
    return f"prefix:{prefixes[0]}" if prefixes and prefixes[0] else ""


def ranked(key: str, names: Sequence[str]) -> list[int]:
    """Return the indices of replicas, the one for ``key`` first; equal names and keys give equal orders."""
    return sorted(range(len(names)), key=lambda index: (_weight(key, names[index]), names[index]))


def groups(key: str, names: Sequence[str]) -> list[list[int]]:
    """Return the indices of replicas in the order to try them; within a group, whoever has the least to do.

    Without a key all are one group. With one, the request overflows to the key's second replica, then to any.
    """
    if not key:
        return [[*range(len(names))]]
    order = ranked(key, names)
    return [group for group in (order[:1], order[1:2], order[2:]) if group]


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=hashlib.sha256(key.encode()).digest()).digest()
