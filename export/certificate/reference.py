"""The logits that graphs are compared with: PyTorch's, in float32, computed once per sequence.

All graphs of a model meet the same sequences. Answers are kept, so the model can go before a graph is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.reference.torch_engine import tree_logits
from outrider.export.weights.mapped import widened
from transformers import PreTrainedModel


class LogitsOfSequences(Protocol):
    """What a graph's logits are compared with."""

    def logits(self, sequences: IntArray) -> FloatArray:
        """Return logits [B, n, V] float32 of whole sequences [B, n] int64."""
        ...


class Reference:
    """Logits of a checkpoint's model, whose weights may be mapped (``weights.mapped``)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: PreTrainedModel | None = model
        self._known: dict[tuple[object, ...], FloatArray] = {}

    def logits(self, sequences: IntArray) -> FloatArray:
        """Return logits [B, n, V] float32 of whole sequences [B, n] int64, without a cache."""
        key = (sequences.shape, sequences.tobytes())
        return self._once(key, lambda model: reference_logits(model, sequences))

    def tree(self, tokens: Sequence[int], parents: tuple[int, ...]) -> FloatArray:
        """Return logits [n, V] float32 of a text with a tree behind it; see ``tree_logits``."""
        key = (tuple(tokens), parents)
        return self._once(key, lambda model: tree_logits(model, tokens, parents))

    def release(self) -> None:
        """Let the model go; what was computed stays."""
        self._model = None

    def _once(
        self, key: tuple[object, ...], compute: Callable[[PreTrainedModel], FloatArray]
    ) -> FloatArray:
        if key not in self._known:
            assert self._model is not None, "a sequence that nobody prepared"
            with widened(self._model):
                self._known[key] = compute(self._model)
        return self._known[key]


def reference_logits(model: PreTrainedModel, sequences: IntArray) -> FloatArray:
    """Return PyTorch's logits [B, n, V] float32 of whole sequences [B, n] int64, without a cache."""
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(np.ascontiguousarray(sequences)), use_cache=False)
    logits: FloatArray = output.logits.float().numpy()
    return logits
