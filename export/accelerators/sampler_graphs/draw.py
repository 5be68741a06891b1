"""Drawing from a row with a uniform number, in integers: no sum rounds, so no border moves.

A uniform number is the 53 bits of ``engines.sampling.noise``. Its products are rounded down exactly, limb by limb,
because TensorRT has no float64.
"""

from __future__ import annotations

from outrider.engines.accelerators.device.sampling.tensors import UNIFORM_BITS
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Value
from outrider.export.accelerators.sampler_graphs.truncate import to_fixed

_LIMB_BITS = (17, 18, 18)
assert sum(_LIMB_BITS) == UNIFORM_BITS


def scaled(number: Value, uniform: Value) -> Value:
    """Return floor(number * uniform / 2 ** 53) for 0 <= number < 2 ** 45, all int64."""
    result = number * 0
    for bits in _LIMB_BITS:
        limb, uniform = uniform % (1 << bits), uniform // (1 << bits)
        result = (limb * number + result) // (1 << bits)
    return result


def draw(row: Value, uniform: Value) -> Value:
    """Return the token [B, 1, 1] int64 whose interval of the running sum holds the uniform number.

    It has mass. The row [B, 1, V] float32 is not negative, with a positive sum of about 1 at most; ``uniform``
    [B, 1, 1] int64 is in units of 2 ** -53.
    """
    fixed = to_fixed(row)
    point = scaled(fixed.sum(), uniform)
    return (fixed.cumsum() <= point).cast(INT64).sum()


def is_drawn(rows: Value, token: Value, uniform: Value, ids: Value) -> Value:
    """Return whether ``draw`` of rows [B, R, V] float32 would yield ``token`` [B, R, 1] int64.

    It needs no running sum, with ``ids`` [V] int64 0, 1, 2, ... Ids outside the vocabulary are never drawn.
    """
    fixed = to_fixed(rows)
    below = (ids < token).where(fixed, 0).sum()
    own = ids.equals(token).where(fixed, 0).sum()
    point = scaled(fixed.sum(), uniform)
    return (below <= point) & (point < below + own)


def race_winner(rows: Value, races: Value, vocab_size: int) -> Value:
    """Return the token x of least E(x) / p(x), ties by lower id; [B, R, 1] int64.

    p are the rows [B, R, V] float32, E the races [B, R, V] float32: independent standard exponentials.
    """
    times = (rows > 0.0).where(races / rows, float("inf"))
    return times.argmin(vocab_size)


def at(values: Value, token: Value, ids_end: int) -> Value:
    """Return ``values`` [B, R, V] at ``token`` [B, R, 1] int64; 0 for ids outside the vocabulary."""
    is_token = (token >= 0) & (token < ids_end)
    found = values.pick(is_token.where(token, 0))
    assert found.dtype == FLOAT
    return is_token.where(found, 0.0)
