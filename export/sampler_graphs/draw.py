"""Drawing from a row with a uniform number, in integers: no sum rounds, so no border moves.

A uniform number is given as the 53 bits of ``engines.sampling.noise`` and stays an integer; products with it
are cut exactly, limb by limb, because TensorRT has no float64.
"""

from __future__ import annotations

from outrider.engines.device.sampling.tensors import UNIFORM_BITS
from outrider.export.sampler_graphs.builder import FLOAT, INT64, Value
from outrider.export.sampler_graphs.truncate import to_fixed

_LIMB_BITS = (17, 18, 18)
assert sum(_LIMB_BITS) == UNIFORM_BITS


def scaled(number: Value, uniform: Value) -> Value:
    """floor(number * uniform / 2 ** 53) for 0 <= number < 2 ** 45, all int64."""
    result = number * 0
    for bits in _LIMB_BITS:
        limb, uniform = uniform % (1 << bits), uniform // (1 << bits)
        result = (limb * number + result) // (1 << bits)
    return result


def draw(row: Value, uniform: Value) -> Value:
    """The token whose interval of the running sum holds the uniform number; never one of no mass.

    Args:
        row: [B, 1, V] float32, not negative, with a positive sum of about 1 at most.
        uniform: [B, 1, 1] int64 in units of 2 ** -53.

    Returns:
        [B, 1, 1] int64.
    """
    fixed = to_fixed(row)
    point = scaled(fixed.sum(), uniform)
    return (fixed.cumsum() <= point).cast(INT64).sum()


def is_drawn(rows: Value, token: Value, uniform: Value, ids: Value) -> Value:
    """Whether ``draw`` would yield ``token``, at every position and without a running sum.

    Args:
        rows: [B, R, V] float32.
        token: [B, R, 1] int64, anything; ids outside the vocabulary are never drawn.
        uniform: [B, R, 1] int64.
        ids: [V] int64, 0, 1, 2, ...
    """
    fixed = to_fixed(rows)
    below = (ids < token).where(fixed, 0).sum()
    own = ids.equals(token).where(fixed, 0).sum()
    point = scaled(fixed.sum(), uniform)
    return (below <= point) & (point < below + own)


def race_winner(rows: Value, races: Value, vocab_size: int) -> Value:
    """Token x of least E(x) / p(x), ties by lower id; [B, R, 1] int64.

    Args:
        rows: [B, R, V] float32, p.
        races: [B, R, V] float32, E: independent standard exponentials.
        vocab_size: V.
    """
    times = (rows > 0.0).where(races / rows, float("inf"))
    return times.argmin(vocab_size)


def at(values: Value, token: Value, ids_end: int) -> Value:
    """``values`` [B, R, V] at ``token`` [B, R, 1] int64; 0 for ids outside the vocabulary."""
    is_token = (token >= 0) & (token < ids_end)
    found = values.pick(is_token.where(token, 0))
    assert found.dtype == FLOAT
    return is_token.where(found, 0.0)
