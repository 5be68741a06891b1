"""How many tokens of context a bundle gets where nobody asks for a number, and what its export wants of the machine.

The context is the model's own: it costs a bundle tables of angles alone, and a server chooses by itself how much of it
the memory of its machine holds.

* At most ``MOST_CONTEXT``: tables take 512 bytes a position with heads of 128.
* A model that names no limit gets ``LEAST_CONTEXT``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.engines.memory.sizes import size_words, token_bytes
from outrider.export.model_config import UNLIMITED_POSITIONS, ModelConfig

LEAST_CONTEXT = 1024
MOST_CONTEXT = 1 << 16
# Measured: SmolLM2-135M 2.4 GiB, Gemma 3 270M 4.7 to 6.0, Qwen2.5-Coder 1.5B 16.2 (docs/measurements.md).
_OWN_BYTES = 1.2e9
_WEIGHT_COPIES = 2.2
# Rows of logits that the certificate compares, and an embedding in float64 beside its float32.
_LOGIT_ROWS = 1000
_FLOAT32_BYTES = 4


def default_context(models: Mapping[str, ModelConfig], *, slot_bytes: int = 0) -> tuple[int, str]:
    """Return a bundle's context in tokens, and why, in words.

    Args:
        models: of the models, by "target" and "draft".
        slot_bytes: what a slot takes beside keys and values, whatever its text.
    """
    part, own = min(
        ((name, one.max_position) for name, one in models.items()), key=lambda item: item[1]
    )
    known = f"the {part}'s {own}"
    if kind := models[part].changing_rope:
        known += f", beyond which the angles of rope_type {kind} change"
    if own >= UNLIMITED_POSITIONS:
        own, known = LEAST_CONTEXT, f"{LEAST_CONTEXT}, since the {part} names no limit"
    of_token = token_bytes(one for model in models.values() for one in model.heads)
    most = min(own, MOST_CONTEXT) * of_token + slot_bytes
    # Layers with a window may keep rings, which is known once the graphs are there.
    at_most = "at most " if any(one.window for one in models.values()) else ""
    full = f"a full slot takes {at_most}{size_words(most)}"
    if own <= MOST_CONTEXT:
        return own, f"context {own}, all of {known}: {full}"
    rule = f"{MOST_CONTEXT} tokens at most; --max-context asks for more"
    return MOST_CONTEXT, f"context {MOST_CONTEXT} of {known}: {full} ({rule})"


def export_memory_bytes(models: Iterable[tuple[int, int]]) -> int:
    """Return about how much memory an export takes at its height; its models are exported one by one.

    Args:
        models: of each its parameters and its vocabulary.
    """
    most = max(
        num_parameters * _FLOAT32_BYTES * _WEIGHT_COPIES + _LOGIT_ROWS * vocab_size * _FLOAT32_BYTES
        for num_parameters, vocab_size in models
    )
    return int(_OWN_BYTES + most)
