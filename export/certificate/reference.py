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
from outrider.engines.trees import path_to
from outrider.export.certificate.feeds import Sources
from outrider.export.weights.mapped import widened
from transformers import PreTrainedModel


class LogitsOfSequences(Protocol):
    """What a graph's logits are compared with."""

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> FloatArray:
        """Return logits [B, n, V] float32 of whole sequences [B, n] int64; rows attend to ``sources``, if any."""
        ...


class Reference:
    """Logits of a checkpoint's model, whose weights may be mapped (``weights.mapped``)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: PreTrainedModel | None = model
        self._known: dict[tuple[object, ...], FloatArray] = {}

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> FloatArray:
        """Return logits [B, n, V] float32 of whole sequences [B, n] int64, without a cache."""
        key = (sequences.shape, sequences.tobytes(), *_key_of(sources))
        return self._once(key, lambda model: reference_logits(model, sequences, sources))

    def tree(
        self, tokens: Sequence[int], parents: tuple[int, ...], source: Sources | None = None
    ) -> FloatArray:
        """Return logits [n, V] float32 of a text with a tree behind it; see ``tree_logits``.

        ``source`` is the text's, one row.
        """
        key = (tuple(tokens), parents, *_key_of(source))
        if source is None:
            return self._once(key, lambda model: tree_logits(model, tokens, parents))
        return self._once(key, lambda model: _logits_by_paths(model, tokens, parents, source))

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


def reference_logits(
    model: PreTrainedModel, sequences: IntArray, sources: Sources | None = None
) -> FloatArray:
    """Return PyTorch's logits [B, n, V] float32 of whole sequences [B, n] int64, without a cache.

    Of a model with an encoder, rows attend to ``sources``.
    """
    texts = torch.from_numpy(np.ascontiguousarray(sequences))
    given = {"input_ids": texts}
    if sources is not None:
        is_read = np.arange(sources.tokens.shape[1]) < sources.lengths[:, None]
        given = {
            "input_ids": torch.from_numpy(sources.tokens),
            "attention_mask": torch.from_numpy(is_read.astype(np.int64)),
            "decoder_input_ids": texts,
        }
    with torch.no_grad():
        output = model(**given, use_cache=False)
    logits: FloatArray = output.logits.float().numpy()
    return logits


def _logits_by_paths(
    model: PreTrainedModel, tokens: Sequence[int], parents: tuple[int, ...], source: Sources
) -> FloatArray:
    """Return logits [n, V] of a text with a tree behind it, each path to a leaf as a sequence of its own.

    Decoders behind an encoder take their positions from columns: they cannot be given those of a tree.
    """
    num_text = len(tokens) - len(parents) - 1
    text, nodes = np.split(np.array(tokens, np.int64), [num_text])
    leaves = sorted({*range(len(nodes))} - {*parents})
    paths = [path_to(leaf, parents) for leaf in leaves]
    longest = num_text + max(map(len, paths))
    # Behind a path its last token is repeated, which no token before it sees.
    rows = [np.concatenate([text, nodes[list(path)]]) for path in paths]
    sequences = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
    sources = Sources(
        tokens=np.repeat(source.tokens, len(rows), axis=0),
        lengths=np.repeat(source.lengths, len(rows)),
    )
    found = reference_logits(model, sequences, sources)
    logits = np.empty((len(tokens), found.shape[2]), np.float32)
    logits[:num_text] = found[0, :num_text]
    for row, path in enumerate(paths):
        logits[num_text + np.array(path)] = found[row, num_text : num_text + len(path)]
    return logits


def _key_of(sources: Sources | None) -> tuple[object, ...]:
    if sources is None:
        return ()
    return sources.tokens.shape, sources.tokens.tobytes(), sources.lengths.tobytes()
