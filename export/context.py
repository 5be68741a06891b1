"""How many tokens of context a bundle gets where nobody asks for a number.

The model's own, or fewer:

* All slots full, K and V of target and draft in float32 take at most ``MEMORY_SHARE`` of this machine's memory. The
  share is of the worst case: caches grow with the texts that are in them, so never fewer than ``LEAST_CONTEXT``.
* At most ``MOST_CONTEXT``: angles lie in the files as tables by position, 512 bytes a position with heads of 128.
* A model that names no limit gets ``LEAST_CONTEXT``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from outrider.export.facts import UNLIMITED_POSITIONS, ModelFacts

MEMORY_SHARE = 0.5
LEAST_CONTEXT = 1024
MOST_CONTEXT = 1 << 16
# Contexts are whole multiples, unless the model's own is chosen.
_STEP = 1024
_FLOAT32_BYTES = 4
# Limit of a container's memory, below that of the machine.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def default_context(
    facts: Mapping[str, ModelFacts], *, max_batch: int, memory_bytes: int | None
) -> tuple[int, str]:
    """Return a bundle's context in tokens, and why, in words.

    Args:
        facts: of the models, by "target" and "draft".
        max_batch: slots.
        memory_bytes: of this machine; None where it is not known.
    """
    part, own = min(
        ((name, one.max_position) for name, one in facts.items()), key=lambda item: item[1]
    )
    known = f"the {part}'s {own}"
    if kind := facts[part].changing_rope:
        known += f", beyond which the angles of rope_type {kind} change"
    if own >= UNLIMITED_POSITIONS:
        own, known = LEAST_CONTEXT, f"{LEAST_CONTEXT}, since the {part} names no limit"
    slot_bytes = max_batch * sum(map(token_bytes, facts.values()))
    most = min(own, MOST_CONTEXT)
    if memory_bytes is not None:
        fitting = int(MEMORY_SHARE * memory_bytes) // slot_bytes // _STEP * _STEP
        most = min(most, max(fitting, LEAST_CONTEXT))
    full = f"{max_batch} full slots take {_size(most * slot_bytes)}"
    memory = "" if memory_bytes is None else f", of {_size(memory_bytes)} of memory"
    if most == own:
        return own, f"context {own}, all of {known}: {full}{memory}"
    rule = (
        f"at most {MEMORY_SHARE:.0%} of memory, {MOST_CONTEXT} tokens; --max-context asks for more"
    )
    return most, f"context {most} of {known}: {full}{memory} ({rule})"


def token_bytes(facts: ModelFacts) -> int:
    """Return what keys and values of one token take in a float32 cache, in bytes."""
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_size * _FLOAT32_BYTES


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


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
