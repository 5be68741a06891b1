"""Rotary angles of a traced graph: those of texts up to the original length, whatever text the model read before.

Transformers chooses them anew in every call, by the longest text: ``dynamic`` in Python, ``longrope`` by a condition
on the largest position. ``export.model_config`` ends the positions of such models where their angles would change.

Source: ``transformers.modeling_rope_utils.dynamic_rope_update``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

# Of a buffer that keeps the angles of a module as it was made; without the first word, of those that it turns by.
_ORIGINAL = "original_inv_freq"


@contextmanager
def original_angles(model: nn.Module) -> Iterator[None]:
    """Let rotary modules turn by their original angles whatever a text's length, and as before at the end."""
    with ExitStack() as kept:
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if kind is None:
                continue
            changed: dict[str, object] = {
                name.replace(_ORIGINAL, "inv_freq"): buffer
                for name, buffer in module.named_buffers(recurse=False)
                if name.endswith(_ORIGINAL)
            }
            changed["rope_type"] = (
                dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            )
            for name, value in changed.items():
                kept.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield
