"""How much memory a machine has, and how much the caches of texts take of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_FLOAT32_BYTES = 4
# Limit of a container's memory, below that of the machine.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def token_bytes(layers: Iterable[tuple[int, int]]) -> int:
    """Return what keys and values of one token take in float32 caches of layers of H and D, in bytes."""
    return sum(2 * heads * size * _FLOAT32_BYTES for heads, size in layers)


def machine_memory_bytes() -> int | None:
    """Return the memory of this machine or, below that, of this container; None where nothing says it."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return min(found, int(limit)) if limit.isdecimal() else found


def size_words(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
