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


def is_batch_invariant(
    extend: Extend,
    cache: KvCache,
    limits: EngineLimits,
    kept_of: Callable[[int], FloatArray] | None = None,
) -> bool:
    """Feed a few tokens one by one and at once, and compare their logits, and what the slot keeps of them.

    Args:
        extend: pads no span.
        cache: its slot 0 holds no text, before and after, and a source where the model reads sources.
        limits: of the engine.
        kept_of: returns what a slot keeps of recurrent layers; None without any. The last token stays open there.
    """
    count = min(_NUM_TOKENS, limits.max_extend, limits.max_context)
    if count < 2:
        return False
    tokens = tuple(index % limits.vocab_size for index in range(count))
    alone = [
        extend(
            [
                Span(
                    slot=0,
                    start=at,
                    tokens=tokens[at : at + 1],
                    num_logits=1,
                    num_settled=int(at < count - 1),
                )
            ]
        )[0, :1].copy()
        for at in range(count)
    ]
    kept_alone = [cache.read(0, count), *([kept_of(0)] if kept_of else [])]
    cache.clear(0)
    span = Span(slot=0, start=0, tokens=tokens, num_logits=count, num_settled=count - 1)
    together = extend([span])[0, :count]
    kept_together = [cache.read(0, count), *([kept_of(0)] if kept_of else [])]
    cache.clear(0)
    pairs = zip([np.concatenate(alone), *kept_alone], [together, *kept_together], strict=True)
    return all(_are_same_bits(one, other) for one, other in pairs)


def _are_same_bits(left: FloatArray, right: FloatArray) -> bool:
    return np.array_equal(left.view(np.int32), right.view(np.int32))
