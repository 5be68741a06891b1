"""How many slots of how many tokens a machine's memory holds.

A bundle's context and slots are what its graphs can. The caches of all slots, full, are reckoned: they take at most
``MEMORY_SHARE`` of what weights and the cache of prefixes leave. Where that is too little for all slots of the whole
context, ``FEW_SLOTS`` share it, with as long a context as fits, and as many more as fit beside. What recurrent layers
and rings keep of each slot is taken off first.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.names import GROUPED_FILE, RINGS_FILE
from outrider.engines.memory.sizes import size_words, token_bytes

MEMORY_SHARE = 0.5
FEW_SLOTS = 8
# Contexts are whole multiples, and no shorter, unless the bundle's own is.
_STEP = 1024


def cache_bytes(manifest: Manifest, context: int, *, has_rings: bool) -> tuple[int, int]:
    """Return the bytes of a token in the caches of target and draft, and of a slot beside.

    Args:
        manifest: of their bundle.
        context: tokens of a slot: rings that texts of this context outgrow do not grow.
        has_rings: whether layers keep rings.
    """
    models = [one for one in (manifest.target, manifest.draft) if one is not None]
    of_states = sum(one.states.slot_bytes for one in models if one.states is not None)
    layers = [found for one in models for found in zip(one.heads, one.ring_columns, strict=True)]
    kept = [(heads, ring) for heads, ring in layers if has_rings and 0 < ring < context]
    of_rings = sum(ring * token_bytes([heads]) for heads, ring in kept)
    growing = token_bytes(heads for heads, _ in layers) - token_bytes(heads for heads, _ in kept)
    return growing, of_states + of_rings


def fit_memory(
    bundle: Bundle,
    *,
    max_running: int,
    max_context: int | None = None,
    prefix_bytes: int = 0,
    memory_bytes: int | None = None,
    has_rings: bool = True,
) -> tuple[Bundle, str]:
    """Return the bundle with the context and slots that are served, and why, in words.

    Args:
        bundle: as it was exported.
        max_running: slots at most.
        max_context: tokens of a slot at most; None for what fits.
        prefix_bytes: memory of the cache of prefixes.
        memory_bytes: of the machine; None where nothing bounds the caches.
        has_rings: whether layers may keep rings; accelerators keep whole caches.
    """
    manifest = bundle.manifest
    context = max_context or manifest.max_context
    slots = min(max_running, manifest.max_batch)
    of_token, of_slot = cache_bytes(manifest, context, has_rings=has_rings)
    # The CPU's own graphs have blocks in another layout, and no engine reads both.
    weights = sum(
        one.size
        for name, one in manifest.files.items()
        if name.endswith(".data") and PurePosixPath(name).stem not in (GROUPED_FILE, RINGS_FILE)
    )
    if memory_bytes is not None:
        room = max(0, int(MEMORY_SHARE * (memory_bytes - weights - prefix_bytes)))
        if slots * (context * of_token + of_slot) > room and max_context is None and of_token:
            fitting = (room // min(slots, FEW_SLOTS) - of_slot) // of_token // _STEP * _STEP
            context = min(context, max(_STEP, fitting))
            of_token, of_slot = cache_bytes(manifest, context, has_rings=has_rings)
        slots = max(1, min(slots, room // (context * of_token + of_slot)))
    full = size_words(slots * (context * of_token + of_slot))
    words = f"{slots} slots of {context} tokens: {full} of memory where all are full"
    if of_slot:
        words += f", {size_words(slots * of_slot)} of it for states and rings, which do not grow"
    if (slots, context) != (min(max_running, manifest.max_batch), manifest.max_context):
        words += (
            f"; the bundle has {manifest.max_batch} of {manifest.max_context}. "
            "--max-context takes fewer tokens for more slots, or more for fewer"
        )
    words += f"; 1,000 tokens take {size_words(1000 * of_token)}"
    return replace(bundle, manifest=replace(manifest, max_context=context, max_batch=slots)), words
