"""Compiled loops that rank a row and cut it: top-k, top-p and min-p, and a whole distribution written in one call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float64, int32, int64, void
from outrider.engines.jit import njit_exact, njit_fastmath
from outrider.engines.sampling.kernels import (
    BLOCK,
    IDS_TYPE,
    ONE,
    ROW_TYPE,
    WIDE_TYPE,
    FloatArray,
    IdArray,
    Row,
    WideArray,
    total,
    write_softmax,
)

# Bins of a histogram of float32 bit patterns: 64 to the octave, down to 2 ** -30.
_BIN_SHIFT = np.int32(17)
_LOWEST_BIN = int(np.float32(2.0**-30).view(np.int32)) >> 17
_NUM_BINS = (int(ONE.view(np.int32)) >> 17) - _LOWEST_BIN + 1


@njit_fastmath(void(ROW_TYPE, IDS_TYPE, int64, int64), void(WIDE_TYPE, IDS_TYPE, int64, int64))
def _sink(values: Row, heap: IdArray, at: int, size: int) -> None:
    """Restore a heap of ids below ``at``, whose root ranks last: by value, then by lower id."""
    moved = heap[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if values[right] < values[left] or (values[right] == values[left] and right > left):
                child += 1
        below = heap[child]
        if values[below] > values[moved] or (values[below] == values[moved] and below < moved):
            break
        heap[at] = below
        at = child
    heap[at] = moved


@njit_fastmath(void(ROW_TYPE, IDS_TYPE), void(WIDE_TYPE, IDS_TYPE))
def _unheap(values: Row, heap: IdArray) -> None:
    """Turn a whole heap into its ids in the order of rank."""
    for end in range(heap.shape[0] - 1, 0, -1):
        heap[0], heap[end] = heap[end], heap[0]
        _sink(values, heap, 0, end)


@njit_fastmath(IDS_TYPE(ROW_TYPE, int64), IDS_TYPE(WIDE_TYPE, int64))
def ranked_greatest(logits: Row, count: int) -> IdArray:
    """Ids of exactly ``count`` greatest logits, [count] int64 by descending logit, ties by lower id.

    Args:
        logits: [V], no NaN.
        count: 1..V.
    """
    ids = np.arange(count)
    for i in range(count // 2 - 1, -1, -1):
        _sink(logits, ids, i, count)
    # The root ranks last of those kept; of equal logits a later id ranks behind.
    for start in range(count, logits.shape[0], BLOCK):
        block, least = logits[start : start + BLOCK], logits[ids[0]]
        num_above = 0
        for i in range(block.shape[0]):
            num_above += block[i] > least
        if num_above > 0:
            for i in range(start, start + block.shape[0]):
                if logits[i] > logits[ids[0]]:
                    ids[0] = i
                    _sink(logits, ids, 0, count)
    _unheap(logits, ids)
    return ids


@njit_fastmath(int64(WIDE_TYPE, float64))
def nucleus_size(weights: WideArray, mass_wanted: float) -> int:
    """Count the leading weights [n] that have less than ``mass_wanted`` before them."""
    mass, size = 0.0, 0
    while size < weights.shape[0] and mass < mass_wanted:
        mass += weights[size]
        size += 1
    return size


@njit_fastmath(int64(int32))
def _bin(bits: np.int32) -> int:
    return max(int(bits >> _BIN_SHIFT) - _LOWEST_BIN, 0)


@njit_fastmath(int64(int32[::1], int32))
def _num_at_least(bits: npt.NDArray[np.int32], limit: np.int32) -> int:
    count = 0
    for i in range(bits.shape[0]):
        count += bits[i] >= limit
    return count


@njit_fastmath(int64(int32[::1], int32, int32))
def _drop_below(bits: npt.NDArray[np.int32], lowest: np.int32, above: np.int32) -> int:
    """Set bit patterns below ``lowest`` to 0; how many of the others are below ``above``."""
    count = 0
    for i in range(bits.shape[0]):
        count += (bits[i] >= lowest) & (bits[i] < above)
        bits[i] = bits[i] if bits[i] >= lowest else np.int32(0)
    return count


@njit_fastmath(void(ROW_TYPE, ROW_TYPE, float64), void(ROW_TYPE, WIDE_TYPE, float64))
def keep_nucleus(weights: FloatArray, logits: Row, mass_wanted: float) -> None:
    """Set to 0 all weights outside the nucleus: those with ``mass_wanted`` or more ranked before them.

    Ranked by weight, then by logit, which a weight rounds, then by lower id.

    Args:
        weights: [V] in [0, 1], changed in place.
        logits: [V].
        mass_wanted: positive, at most the sum of the weights.
    """
    bits = weights.view(np.int32)
    masses = np.zeros(_NUM_BINS)
    lowest = np.int32((_LOWEST_BIN + 1) << _BIN_SHIFT)
    for start in range(0, bits.shape[0], BLOCK):
        if _num_at_least(bits[start : start + BLOCK], lowest) > 0:
            for i in range(start, min(start + BLOCK, bits.shape[0])):
                masses[_bin(bits[i])] += weights[i]
    edge, mass = _NUM_BINS - 1, 0.0
    while edge > 0 and mass + masses[edge] < mass_wanted:
        mass += masses[edge]
        edge -= 1
    lowest = np.int32((_LOWEST_BIN + edge) << _BIN_SHIFT) if edge > 0 else np.int32(0)
    above = np.int32((_LOWEST_BIN + edge + 1) << _BIN_SHIFT)
    within, size = np.empty(weights.shape[0], dtype=np.int64), 0
    for start in range(0, bits.shape[0], BLOCK):
        block = bits[start : start + BLOCK]
        if _drop_below(block, lowest, above) > 0:
            for i in range(block.shape[0]):
                if lowest <= block[i] < above:
                    within[size] = start + i
                    size += 1
    ids = within[:size]
    for i in range(size // 2 - 1, -1, -1):
        _sink(logits, ids, i, size)
    _unheap(logits, ids)
    for i in ids:
        if mass >= mass_wanted:
            weights[i] = 0.0
        else:
            mass += weights[i]


@njit_exact(
    float64(ROW_TYPE, ROW_TYPE, float64, float64, float64),
    float64(ROW_TYPE, WIDE_TYPE, float64, float64, float64),
)
def truncate(weights: FloatArray, logits: Row, mass: float, top_p: float, min_p: float) -> float:
    """Set to 0 what top-p and then min-p remove.

    Args:
        weights: [V], the greatest is 1; changed in place.
        logits: [V], what they are the weights of.
        mass: sum of the weights.
        top_p: (0, 1]; 1 is off.
        min_p: [0, 1]; 0 is off.

    Returns:
        The sum of what is left.
    """
    if top_p == 1.0 and min_p == 0.0:
        return mass
    if top_p < 1.0:
        keep_nucleus(weights, logits, top_p * mass)
    least = np.float32(min_p)
    for i in range(weights.shape[0]):
        if weights[i] < least:
            weights[i] = 0.0
    return total(weights)


@njit_exact(float64(ROW_TYPE, float64, float64, float64, ROW_TYPE))
def write_dense(
    logits: FloatArray, inverse_temperature: float, top_p: float, min_p: float, weights: FloatArray
) -> float:
    """Write the weights of a row at a temperature, cut by top-p and min-p.

    Returns:
        The sum of the weights [V]; 0 where the logits are not finite, see ``write_softmax``.
    """
    mass = write_softmax(logits, inverse_temperature, weights)
    return truncate(weights, logits, mass, top_p, min_p) if mass > 0.0 else 0.0
