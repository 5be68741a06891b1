"""The tensors of one call of a model's graph: addresses, shapes and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from outrider.engines.accelerators.device.base import Call, DeviceTensor
from outrider.engines.base import IntArray, Span
from outrider.engines.bundle.encoder_decoder import (
    SOURCE,
    SOURCE_LENGTH,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import (
    ANCESTORS,
    COLUMNS,
    LENGTHS,
    LOGIT_POSITIONS,
    LOGITS,
    POSITIONS,
    START,
    TOKENS,
    past_names,
    present_names,
)
from outrider.engines.bundle.plans import PlanEntry, Shape, source_capacity

# Of the caches. NumPy has no bfloat16; two bytes that nobody computes with stand for it.
CACHE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float8": np.dtype(np.float16),
}
_INT64, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)


class ModelTensors:
    """Describes the calls of one plan; its caches of texts are [rows, heads, capacity, size], or by token.

    Attributes:
        pairs: inputs and outputs of the caches of texts that are one piece of memory.
        source_pairs: of the caches of sources, likewise; none of a model without an encoder.
    """

    def __init__(self, model: ModelEntry, entry: PlanEntry, *, is_by_token: bool = False) -> None:
        self._vocab_size = model.vocab_size
        self._dtype = CACHE_DTYPES[entry.precision]
        heads, size = cache_heads(model, is_by_token=is_by_token)
        self._row = (entry.capacity, size) if is_by_token else (heads, entry.capacity, size)
        pasts, presents = past_names(model.num_layers), present_names(model.num_layers)
        self.pairs = list(zip(pasts, presents, strict=True))
        self._caches = (*pasts, *presents)
        self.source_pairs: list[tuple[str, str]] = []
        self._source_caches: tuple[str, ...] = ()
        self._source_row: tuple[int, ...] = (0, 0, 0)
        if (source := model.source) is not None:
            pasts, presents = (
                names(model.num_layers) for names in (cross_past_names, cross_present_names)
            )
            self.source_pairs = list(zip(pasts, presents, strict=True))
            self._source_caches = (*pasts, *presents)
            self._source_row = (
                source.num_heads,
                source_capacity(source.max_source),
                source.head_size,
            )

    def call(self, shape: Shape, addresses: Mapping[str, int]) -> Call:
        """A call of the plan; addresses come in the same order every time."""
        key = (self._row, shape, *addresses.values())
        return Call(key, lambda: self.describe(shape, addresses))

    def describe(self, shape: Shape, addresses: Mapping[str, int]) -> dict[str, DeviceTensor]:
        """Every input and output that has an address, by name."""
        batch, tokens, wanted = shape
        kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            TOKENS: ((batch, tokens), _INT64),
            START: ((batch,), _INT64),
            LENGTHS: ((batch,), _INT64),
            LOGIT_POSITIONS: ((batch, wanted), _INT64),
            POSITIONS: ((batch, tokens), _INT64),
            ANCESTORS: ((batch, tokens, tokens), _BOOL),
            # Of a path that is kept, its tokens.
            COLUMNS: ((tokens,), _INT64),
            # Of sources, their tokens.
            SOURCE: ((batch, tokens), _INT64),
            SOURCE_LENGTH: ((batch,), _INT64),
            LOGITS: ((batch, wanted, self._vocab_size), _FLOAT32),
        }
        kinds |= dict.fromkeys(self._caches, ((batch, *self._row), self._dtype))
        kinds |= dict.fromkeys(self._source_caches, ((batch, *self._source_row), self._dtype))
        return {name: DeviceTensor(pointer, *kinds[name]) for name, pointer in addresses.items()}


def cache_heads(model: ModelEntry, *, is_by_token: bool) -> tuple[int, int]:
    """Heads of a cache of texts and the size of one: all are one where a token's heads lie side by side."""
    heads, size = model.num_kv_heads, model.head_size
    return (1, heads * size) if is_by_token else (heads, size)


def feeds_of(spans: Sequence[Span], shape: Shape) -> dict[str, IntArray]:
    """The integers of a call; a row's last token and last wanted position repeat as padding.

    Lengths are those of the rectangle: causality counts back from the last column, padding or not.
    """
    tokens = np.zeros((shape.batch, shape.tokens), dtype=np.int64)
    positions = np.zeros((shape.batch, shape.wanted), dtype=np.int64)
    for row, span in enumerate(spans):
        num_tokens = len(span.tokens)
        tokens[row] = span.tokens[-1] if span.tokens else 0
        tokens[row, :num_tokens] = span.tokens
        positions[row] = max(0, num_tokens - 1)
        positions[row, : span.num_logits] = range(num_tokens - span.num_logits, num_tokens)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    lengths = starts + shape.tokens
    return {TOKENS: tokens, START: starts, LENGTHS: lengths, LOGIT_POSITIONS: positions}
