"""Top-k, top-p and min-p without a sort: thresholds found by bisecting the pattern of a float.

IEEE floats are ordered as their bit patterns are, so 32 comparisons find a threshold exactly,
whatever the row holds. ONNX cannot reinterpret bits in opset 24; but only the one threshold per row
has to be turned from a pattern into a float, and that is arithmetic (``_float_of``). Masses are sums
of integers: exact, and the same in any order of summation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engines.sampler_tensors import FRACTION_BITS, TOP_P_BITS
from export.sampler_graphs.builder import FLOAT, INT32, INT64, Value

_MANTISSA = 1 << 23
_INFINITY_PATTERN = 0x7F800000
# Twice the pattern of infinity is below 2 ** 32.
_NUM_ROUNDS = 32
# What a pattern's exponent multiplies its mantissa by; 0 stands for subnormal numbers, 255 is inf.
_SCALES = np.concatenate([[2.0**-126], 2.0 ** np.arange(-126, 128), [np.inf]]).astype(np.float32)


def to_fixed(fractions: Value) -> Value:
    """Float32 fractions of at most 1 as int64 in units of 2 ** -44, the rest cut off."""
    return (fractions * float(1 << FRACTION_BITS)).cast(INT64)


def truncated(order: Value, weights: Value, *, top_k: Value, top_p: Value, min_p: Value) -> Value:
    """Weights of the tokens that are kept; 0 elsewhere.

    Args:
        order: [B, R, V] float32, processed logits: what "largest" means; no NaN, no +inf.
        weights: [B, R, V] float32, exp((logit - greatest) / temperature); the greatest is 1.
        top_k: [B, 1, 1] int64, 1..V.
        top_p: [B, 1, 1] int64 in units of 2 ** -30.
        min_p: [B, 1, 1] float32.
    """
    is_kept = _greatest(order, top_k.cast(INT32))
    fixed = to_fixed(is_kept.where(weights, 0.0))
    is_kept = _nucleus(order, fixed, _share(fixed.sum(), top_p)) & is_kept
    return (is_kept & (weights >= min_p)).where(weights, 0.0)


def _greatest(order: Value, count: Value) -> Value:
    """Which are the ``count`` greatest, ties by lower id; [B, R, V] bool."""
    threshold = _bisect(order, lambda t: (order >= t).cast(INT32).sum() >= count)
    is_above = order > threshold
    is_tie = order.equals(threshold)
    num_ties = count - is_above.cast(INT32).sum()
    return is_above | (is_tie & (is_tie.cast(INT32).cumsum() <= num_ties))


def _nucleus(order: Value, fixed: Value, wanted: Value) -> Value:
    """Which tokens have less than the ``wanted`` mass before them, ties by lower id."""
    threshold = _bisect(order, lambda t: (order >= t).where(fixed, 0).sum() >= wanted)
    is_above = order > threshold
    is_tie = order.equals(threshold)
    mass_above = is_above.where(fixed, 0).sum()
    tied = is_tie.where(fixed, 0)
    return is_above | (is_tie & (mass_above + tied.cumsum() - tied < wanted))


def _share(total: Value, top_p: Value) -> Value:
    """ceil(total * top_p) for total < 2 ** 62, top_p <= 2 ** 30; no product leaves 63 bits."""
    unit = 1 << TOP_P_BITS
    upper, lower = total // unit, total % unit
    return upper * top_p + (lower * top_p + (unit - 1)) // unit


def _bisect(order: Value, holds: Callable[[Value], Value]) -> Value:
    """The greatest float at which ``holds``, which is true at -inf, false at inf and falls once.

    Returns:
        [B, R, 1] float32.
    """
    peak = order.slice(0, 1, -1)  # only its shape matters
    low = peak.equals(peak).where(peak.graph.constant(-_INFINITY_PATTERN, INT64), 0)
    high = low * -1
    for _ in range(_NUM_ROUNDS):
        # Patterns below 0 stand for floats below 0. The distance is not negative, so it halves well.
        middle = low + (high - low) // 2
        is_true = holds(_float_of(middle))
        low, high = is_true.where(middle, low), is_true.where(high, middle)
    return _float_of(low)


def _float_of(pattern: Value) -> Value:
    """The float of a pattern, the sign of which is its own; [B, R, 1] int64 -> float32, exact."""
    graph = pattern.graph
    magnitude = graph.op("Abs", pattern)
    exponent, mantissa = magnitude // _MANTISSA, magnitude % _MANTISSA
    scale = graph.op("Gather", graph.constant(_SCALES, FLOAT), exponent, axis=0)
    hidden = (exponent > 0).where(graph.constant(_MANTISSA, INT64), 0)
    significand = (mantissa + hidden).cast(FLOAT) * (1.0 / _MANTISSA)
    magnitude_value = scale * significand
    return (pattern < 0).where(magnitude_value * -1.0, magnitude_value)
