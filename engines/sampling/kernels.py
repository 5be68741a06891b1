"""Compiled loops over one row: softmax weights, sums, draws, and the ratio test with its residual.

A row of 4,096 takes about a microsecond per pass, where numpy needs many passes. Every function depends on the row's
values and length alone, so a row has the same bits alone and in any batch. Sums run over blocks of ``BLOCK`` in
float32, whose order the compiler may choose once and for all, and over blocks in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, float64, int32, int64, types, void
from outrider.engines.jit import njit_exact, njit_fastmath

FloatArray = npt.NDArray[np.float32]
WideArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
Row = FloatArray | WideArray

BLOCK = 64
# Where exp comes closest to the least normal float32; further down a weight is 0.
_LOWEST = np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_HALF = np.float32(0.5)
ONE = np.float32(1.0)
# ln 2 in two parts, so that their multiples by small integers leave an exact remainder.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# exp(r) = 1 + r + r^2 P(r) for |r| <= ln(2) / 2, to 1e-7; Cephes, expf.
_P5, _P4, _P3, _P2, _P1, _P0 = (
    np.float32(value)
    for value in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_MANTISSA_BITS = np.int32(23)
_NO_SIGN = np.int32(0x7FFFFFFF)
_INFINITY_BITS = np.int32(0x7F800000)
_LEAST_BITS = np.int32(-(2**31))
# Below this share of p the float32 difference of two rows is rounding, not mass.
SMALLEST_RESIDUAL = 1e-6

_WORD_BITS = 32

ROW_TYPE = float32[::1]
WIDE_TYPE = float64[::1]
IDS_TYPE = int64[::1]
# Masks may lie in memory that is not to be written to.
_MASK_TYPE = types.Array(int32, 1, "C", readonly=True)


@njit_fastmath(
    void(ROW_TYPE, float64, float64, ROW_TYPE), void(WIDE_TYPE, float64, float64, ROW_TYPE)
)
def write_weights(
    logits: Row, peak: float, inverse_temperature: float, weights: FloatArray
) -> None:
    """Write exp((z - peak) / temperature).

    Args:
        logits: [V] float32 or float64, none above ``peak``; -inf has weight 0.
        peak: subtracted first, so that the greatest exponents are the most precise.
        inverse_temperature: positive.
        weights: [V] float32, overwritten; relative error 2e-7 beside the rounding of the exponent.
    """
    top, scale = logits.dtype.type(peak), np.float32(inverse_temperature)
    bits = weights.view(np.int32)
    for i in range(logits.shape[0]):
        exponent = np.float32(logits[i] - top) * scale
        x = max(exponent, _LOWEST)
        n = np.floor(x * _LOG2_E + _HALF)
        r = x - n * _LN2_HIGH
        r -= n * _LN2_LOW
        y = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
        weights[i] = y * r * r + r + ONE
        bits[i] += np.int32(n) << _MANTISSA_BITS
        if exponent < _LOWEST:
            weights[i] = 0.0


@njit_exact(void(ROW_TYPE, _MASK_TYPE, ROW_TYPE), void(ROW_TYPE, _MASK_TYPE, WIDE_TYPE))
def write_masked(logits: FloatArray, mask: npt.NDArray[np.int32], masked: Row) -> None:
    """Write a row of logits with -inf for the tokens that may not follow.

    Args:
        logits: [V].
        mask: [at least ceil(V / 32)]; bit t % 32 of word t // 32 says whether token t may.
        masked: [V], overwritten.

    Raises:
        IndexError: the mask has fewer bits than there are logits.
    """
    size = logits.shape[0]
    if mask.shape[0] * _WORD_BITS < size:
        raise IndexError("the mask is of a smaller vocabulary")
    for start in range(0, size, _WORD_BITS):
        word = mask[start // _WORD_BITS]
        given, written = logits[start : start + _WORD_BITS], masked[start : start + _WORD_BITS]
        for bit in range(given.shape[0]):
            written[bit] = given[bit] if (word >> np.int32(bit)) & np.int32(1) else -np.inf


@njit_fastmath(float64(ROW_TYPE), float64(WIDE_TYPE))
def total(weights: Row) -> float:
    """Sum of a row [n]."""
    mass = 0.0
    for start in range(0, weights.shape[0], BLOCK):
        block = weights[start : start + BLOCK]
        part = weights.dtype.type(0.0)
        for i in range(block.shape[0]):
            part += block[i]
        mass += float(part)
    return mass


@njit_fastmath(float64(ROW_TYPE))
def _peak(logits: FloatArray) -> float:
    """The greatest logit, NaN where there is one.

    Compares bit patterns, whose order is that of the numbers once the negative ones are turned round: the compiler
    makes no vectors of comparisons that NaN may spoil.
    """
    bits = logits.view(np.int32)
    top, num_nan = _LEAST_BITS, 0
    for i in range(bits.shape[0]):
        top = max(top, bits[i] ^ ((bits[i] >> np.int32(31)) & _NO_SIGN))
        num_nan += (bits[i] & _NO_SIGN) > _INFINITY_BITS
    if num_nan > 0:
        return np.nan
    found = np.empty(1, dtype=np.int32)
    found[0] = top ^ ((top >> np.int32(31)) & _NO_SIGN)
    return float(found.view(np.float32)[0])


@njit_fastmath(int64(ROW_TYPE))
def greatest(logits: FloatArray) -> int:
    """Lowest id of the greatest logit [V]; -1 where the row holds NaN, +inf or nothing but -inf."""
    peak = _peak(logits)
    if not np.isfinite(peak):
        return -1
    top = np.float32(peak)
    for start in range(0, logits.shape[0], BLOCK):
        block = logits[start : start + BLOCK]
        num_equal = 0
        for i in range(block.shape[0]):
            num_equal += block[i] == top
        if num_equal > 0:
            for i in range(block.shape[0]):
                if block[i] == top:
                    return start + i
    return -1


@njit_fastmath(float64(ROW_TYPE, float64, ROW_TYPE))
def write_softmax(logits: FloatArray, inverse_temperature: float, weights: FloatArray) -> float:
    """Write exp((z - peak) / temperature) for the row's own peak; see ``write_weights``.

    Returns:
        The sum of the weights; 0 where the logits hold NaN, +inf or nothing but -inf, and nothing was written.
    """
    peak = _peak(logits)
    if not np.isfinite(peak):
        return 0.0
    write_weights(logits, peak, inverse_temperature, weights)
    return total(weights)


@njit_fastmath(WIDE_TYPE(ROW_TYPE, IDS_TYPE, float64), WIDE_TYPE(WIDE_TYPE, IDS_TYPE, float64))
def few_weights(logits: Row, ids: IdArray, inverse_temperature: float) -> WideArray:
    """[n] float64 exp((z - peak) / temperature) of some ids, whose first has the peak."""
    weights = np.empty(ids.shape[0])
    for i in range(ids.shape[0]):
        exponent = float64(logits[ids[i]]) - float64(logits[ids[0]])
        weights[i] = np.exp(exponent * inverse_temperature)
    return weights


@njit_fastmath(int64(ROW_TYPE, float64), int64(WIDE_TYPE, float64))
def draw(weights: Row, point: float) -> int:
    """Index whose interval of the running sum holds ``point``; never one of weight 0.

    Args:
        weights: [n], non-negative with a positive sum.
        point: at least 0. Where rounding left it beyond the sum, the last index with any weight is drawn.
    """
    mass, last = 0.0, -1
    for start in range(0, weights.shape[0], BLOCK):
        block = weights[start : start + BLOCK]
        part = weights.dtype.type(0.0)
        for i in range(block.shape[0]):
            part += block[i]
        if mass + float(part) > point:
            within = mass
            for i in range(block.shape[0]):
                within += float(block[i])
                if block[i] > 0.0:
                    last = start + i
                    if within > point:
                        return last
        mass += float(part)
    if last < 0:
        for i in range(weights.shape[0]):
            if weights[i] > 0.0:
                last = i
    return last


@njit_fastmath(float64(ROW_TYPE, ROW_TYPE, float64, ROW_TYPE))
def write_shared(target: FloatArray, draft: FloatArray, scale: float, shared: FloatArray) -> float:
    """Write min(p, scale * q), 0 where the shorter row has ended.

    Args:
        target: [V] p.
        draft: [n] q.
        scale: at least 0.
        shared: [V], overwritten.

    Returns:
        Its sum.
    """
    factor, num_both = np.float32(scale), min(target.shape[0], draft.shape[0])
    for i in range(num_both):
        shared[i] = min(target[i], draft[i] * factor)
    shared[num_both:] = np.float32(0.0)
    return total(shared)


@njit_fastmath(float64(WIDE_TYPE, IDS_TYPE, WIDE_TYPE, IDS_TYPE, float64, ROW_TYPE, WIDE_TYPE))
def write_shared_few(
    target: WideArray,
    target_ids: IdArray,
    draft: WideArray,
    draft_ids: IdArray,
    scale: float,
    scratch: FloatArray,
    shared: WideArray,
) -> float:
    """``write_shared`` of two rows of a few ids each.

    Args:
        target: [n] p of ``target_ids``.
        target_ids: [n].
        draft: [m] q of ``draft_ids``.
        draft_ids: [m].
        scale: at least 0.
        scratch: [V] to write in.
        shared: [n], overwritten.

    Returns:
        Its sum.
    """
    for i in target_ids:
        scratch[i] = 0.0
    for k in range(draft_ids.shape[0]):
        scratch[draft_ids[k]] = draft[k]
    for k in range(target_ids.shape[0]):
        shared[k] = min(target[k], scratch[target_ids[k]] * scale)
    return total(shared)


@njit_exact(boolean(float64, float64, float64, float64, float64, float64))
def is_kept(
    coin: float,
    lenience: float,
    target_weight: float,
    target_total: float,
    draft_weight: float,
    draft_total: float,
) -> bool:
    """Say whether u l q(x) < p(x), each probability as the weight of x and the sum of all weights.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1 and, for the lenience l, appendix A.5.
    """
    return coin * lenience * draft_weight * target_total < target_weight * draft_total


@njit_fastmath(float64(ROW_TYPE, ROW_TYPE), float64(WIDE_TYPE, WIDE_TYPE))
def leave_rest(weights: Row, taken: Row) -> float:
    """Overwrite what is taken by weights - taken, both [n]. Its sum."""
    for i in range(weights.shape[0]):
        taken[i] = weights[i] - taken[i]
    return total(taken)


@njit_exact(float64(ROW_TYPE, ROW_TYPE, float64), float64(WIDE_TYPE, WIDE_TYPE, float64))
def leave_residual(weights: Row, shared: Row, mass: float) -> float:
    """Overwrite what p and q share by (p - q)+, unnormalised.

    Args:
        weights: [n] p.
        shared: [n] min(p, q), overwritten.
        mass: sum of the weights.

    Returns:
        Its sum; 0 where it is rounding, and p has to stand in for it.
    """
    left = leave_rest(weights, shared)
    return left if left > SMALLEST_RESIDUAL * mass else 0.0


@njit_exact(
    types.Tuple((boolean, float64))(
        float64, float64, float64, float64, float64, float64, ROW_TYPE, ROW_TYPE
    ),
    types.Tuple((boolean, float64))(
        float64, float64, float64, float64, float64, float64, WIDE_TYPE, WIDE_TYPE
    ),
)
def judge_token(
    coin: float,
    lenience: float,
    target_weight: float,
    target_total: float,
    draft_weight: float,
    draft_total: float,
    weights: Row,
    shared: Row,
) -> tuple[bool, float]:
    """Decide whether a draft token is kept, and leave the residual where it is not.

    Every ratio test on the CPU is this one: of chains and trees, in compiled rounds and step by step.

    Args:
        coin: u in [0, 1).
        lenience: l in (0, 1]; 1 is exact.
        target_weight: p(x), as are the other three as ``is_kept`` takes them.
        target_total: sum of ``weights``.
        draft_weight: q(x).
        draft_total: sum of q.
        weights: [n] p.
        shared: [n] min(p, q); overwritten by the residual if x is rejected.

    Returns:
        Whether it is kept, and the residual's mass; see ``leave_residual``.
    """
    if is_kept(coin, lenience, target_weight, target_total, draft_weight, draft_total):
        return True, 0.0
    return False, leave_residual(weights, shared, target_total)
