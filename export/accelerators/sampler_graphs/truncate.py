"""Top-k, top-p and min-p without a sort: thresholds found by bisecting the bits of a float.

IEEE floats are ordered like their bit patterns, so a threshold is found exactly by fixing its sign, exponent and
mantissa bit by bit. ONNX cannot reinterpret bits in opset 24: an exponent's bit is a product, a mantissa's bit a sum,
both exact. Masses are sums of integers: exact, in any order.
"""

from __future__ import annotations

import numpy as np
from outrider.engines.accelerators.device.sampling.tensors import FRACTION_BITS, TOP_P_BITS
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT32, INT64, Value

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_NORMAL = 2.0**-126
# Doublings that lead from the least exponent to any other, greatest first; a float holds no 2 ** 128.
_EXPONENT_STEPS = (64, 64, 64, 32, 16, 8, 4, 2, 1)
_MANTISSA_BITS = 23


def to_fixed(fractions: Value) -> Value:
    """Return float32 fractions of at most 1 as int64 in units of 2 ** -42, rounded down."""
    return (fractions * float(1 << FRACTION_BITS)).cast(INT64)


def truncated(order: Value, weights: Value, *, top_k: Value, top_p: Value, min_p: Value) -> Value:
    """Return the weights of the tokens that are kept; 0 elsewhere.

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
    """Return the ``count`` greatest tokens, ties by lower id; [B, R, V] bool."""
    ones = order.equals(order).cast(INT32)
    threshold = _threshold(order, ones, count)
    is_above = order > threshold
    is_tie = order.equals(threshold)
    num_ties = count - is_above.cast(INT32).sum()
    return is_above | (is_tie & (is_tie.cast(INT32).cumsum() <= num_ties))


def _nucleus(order: Value, fixed: Value, wanted: Value) -> Value:
    """Return tokens with less than the ``wanted`` mass before them, ties by lower id."""
    threshold = _threshold(order, fixed, wanted)
    is_above = order > threshold
    is_tie = order.equals(threshold)
    mass_above = is_above.where(fixed, 0).sum()
    tied = is_tie.where(fixed, 0)
    return is_above | (is_tie & (mass_above + tied.cumsum() - tied < wanted))


def _share(total: Value, top_p: Value) -> Value:
    """Return ceil(total * top_p) for total < 2 ** 62, top_p <= 2 ** 30; no product leaves 63 bits."""
    unit = 1 << TOP_P_BITS
    upper, lower = total // unit, total % unit
    return upper * top_p + (lower * top_p + (unit - 1)) // unit


def _threshold(order: Value, masses: Value, wanted: Value) -> Value:
    """Return the greatest logit [B, R, 1] float32 such that tokens at or above it have the ``wanted`` mass.

    Below 0 it is the logit of greatest magnitude such that tokens above it have less. Both are the logit of the
    token that completes the mass.

    Args:
        order: [B, R, V] float32, no NaN.
        masses: [B, R, V] integers, not negative.
        wanted: [B, R, 1] or [B, 1, 1], of the same type, 1..total.
    """
    order = order.graph.op("Max", order, -_LARGEST)
    is_negative = (order >= 0.0).where(masses, 0).sum() < wanted
    magnitudes = is_negative.where(order * -1.0, order)
    wanted = is_negative.where(masses.sum() - wanted + 1, wanted)

    def reaches(trial: Value) -> Value:
        return (magnitudes >= trial).where(masses, 0).sum() >= wanted

    smallest = is_negative.where(order.graph.constant(_SMALLEST_NORMAL, FLOAT), _SMALLEST_NORMAL)
    power = smallest
    for step in _EXPONENT_STEPS:
        trial = power * 2.0**step
        power = reaches(trial).where(trial, power)
    # Where not even the smallest exponent is reached, the number is subnormal, or 0.
    found = reaches(smallest).where(power, 0.0)
    for bit in range(1, _MANTISSA_BITS + 1):
        trial = found + power * 2.0**-bit
        found = reaches(trial).where(trial, found)
    return is_negative.where(found * -1.0, found)
