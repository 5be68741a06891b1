"""Tests whether a backend gives a token fed alone the bits that it has beside others.

ONNX Runtime's CPU provider has one kernel for products of many rows. A single row takes the same kernel where the
float32 weights were packed when the model was opened, and another one where they were not, as in attention; for weights
in blocks it depends on the machine. Which kernels run depends on library, machine and shapes, not on values, so a few
tokens decide it.

Source: onnxruntime, core/mlas/lib/sgemm.cpp, MlasSgemmOperation and MlasSgemmPackedOperation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.kv_cache import KvCache

Extend = Callable[[Sequence[Span]], FloatArray]

# The second is the first whose attention weighs anything.
_NUM_TOKENS = 3


def is_batch_invariant(extend: Extend, cache: KvCache, limits: EngineLimits) -> bool:
    """Feed a few tokens one by one and at once, and compare their logits, keys and values.

    ``extend`` pads no span; slot 0 of its cache holds no text, before and after, and a source where the model reads
    sources.
    """
    count = min(_NUM_TOKENS, limits.max_extend, limits.max_context)
    if count < 2:
        return False
    tokens = tuple(index % limits.vocab_size for index in range(count))
    alone = [
        extend([Span(slot=0, start=at, tokens=tokens[at : at + 1], num_logits=1)])[0, :1].copy()
        for at in range(count)
    ]
    cached_alone = cache.read(0, count)
    cache.clear(0)
    together = extend([Span(slot=0, start=0, tokens=tokens, num_logits=count)])[0, :count]
    are_same = _are_same_bits(np.concatenate(alone), together)
    are_same = are_same and _are_same_bits(cached_alone, cache.read(0, count))
    cache.clear(0)
    return are_same


def _are_same_bits(left: FloatArray, right: FloatArray) -> bool:
    return np.array_equal(left.view(np.int32), right.view(np.int32))
