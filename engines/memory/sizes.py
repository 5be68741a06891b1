"""How much memory a machine has, and how much the caches of texts take of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

_FLOAT32_BYTES = 4
# Limit of a container's memory, below that of the machine.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class CacheSizes(Protocol):
    """Sizes of a model's cache."""

    @property
    def heads(self) -> Sequence[tuple[int, int]]: ...  # noqa: D102


def token_bytes(models: Iterable[CacheSizes]) -> int:
    """Return what keys and values of one token take in the float32 caches of all models, in bytes."""
    return sum(2 * heads * size * _FLOAT32_BYTES for one in models for heads, size in one.heads)


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
