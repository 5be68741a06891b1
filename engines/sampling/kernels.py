"""Compiled loops over one row: softmax weights, sums, draws, ranks and nuclei, each in one pass where numpy needs many.

And over one draft: all that a row's proposal or judgement does in one call, made of the same loops.

A row of 4,096 takes about a microsecond per pass, where a step of a small model takes two milliseconds and samples ten
rows. Every function is one of the row's values and length alone, so a row has the same bits alone and in any batch.
Sums run over blocks of ``_BLOCK`` in float32, whose order the compiler may choose once and for all, and over blocks in
float64. One file, because the functions call each other (``engines.jit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, float64, int32, int64, types, uint64, void
from outrider.engines.jit import njit_exact, njit_fastmath
from outrider.engines.sampling import philox

FloatArray = npt.NDArray[np.float32]
WideArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
Row = FloatArray | WideArray

_BLOCK = 64
# Where exp comes closest to the least normal float32; further down a weight is 0.
_LOWEST = np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
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
# Bins of a histogram of float32 bit patterns: 64 to the octave, down to 2 ** -30.
_BIN_SHIFT = np.int32(17)
_LOWEST_BIN = int(np.float32(2.0**-30).view(np.int32)) >> 17
_NUM_BINS = (int(_ONE.view(np.int32)) >> 17) - _LOWEST_BIN + 1

# Below this share of p the float32 difference of two rows is rounding, not mass.
SMALLEST_RESIDUAL = 1e-6

_ROW = float32[::1]
_ROWS = float32[:, ::1]
_WIDE = float64[::1]
_IDS = int64[::1]
_BATCH = float32[:, :, ::1]

# Columns of a table of greedy rows (``judge_greedy``).
ROW, DRAFTED, KEPT, TOKEN, DRAFT = range(5)


@njit_fastmath(void(_ROW, float64, float64, _ROW), void(_WIDE, float64, float64, _ROW))
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
        weights[i] = y * r * r + r + _ONE
        bits[i] += np.int32(n) << _MANTISSA_BITS
        if exponent < _LOWEST:
            weights[i] = 0.0


@njit_fastmath(float64(_ROW), float64(_WIDE))
def total(weights: Row) -> float:
    """Sum of a row [n]."""
    mass = 0.0
    for start in range(0, weights.shape[0], _BLOCK):
        block = weights[start : start + _BLOCK]
        part = weights.dtype.type(0.0)
        for i in range(block.shape[0]):
            part += block[i]
        mass += float(part)
    return mass


@njit_fastmath(float64(_ROW))
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


@njit_fastmath(int64(_ROW))
def greatest(logits: FloatArray) -> int:
    """Lowest id of the greatest logit [V]; -1 where the row holds NaN, +inf or nothing but -inf."""
    peak = _peak(logits)
    if not np.isfinite(peak):
        return -1
    top = np.float32(peak)
    for start in range(0, logits.shape[0], _BLOCK):
        block = logits[start : start + _BLOCK]
        num_equal = 0
        for i in range(block.shape[0]):
            num_equal += block[i] == top
        if num_equal > 0:
            for i in range(block.shape[0]):
                if block[i] == top:
                    return start + i
    return -1


@njit_fastmath(float64(_ROW, float64, _ROW))
def write_law(logits: FloatArray, inverse_temperature: float, weights: FloatArray) -> float:
    """Write exp((z - peak) / temperature) for the row's own peak; see ``write_weights``.

    Returns:
        The sum of the weights; 0 where the logits hold NaN, +inf or nothing but -inf, and nothing was written.
    """
    peak = _peak(logits)
    if not np.isfinite(peak):
        return 0.0
    write_weights(logits, peak, inverse_temperature, weights)
    return total(weights)


@njit_fastmath(_WIDE(_ROW, _IDS, float64), _WIDE(_WIDE, _IDS, float64))
def few_weights(logits: Row, ids: IdArray, inverse_temperature: float) -> WideArray:
    """[n] float64 exp((z - peak) / temperature) of some ids, whose first has the peak."""
    weights = np.empty(ids.shape[0])
    for i in range(ids.shape[0]):
        exponent = float64(logits[ids[i]]) - float64(logits[ids[0]])
        weights[i] = np.exp(exponent * inverse_temperature)
    return weights


@njit_fastmath(float64(_WIDE, _IDS, _WIDE, _IDS, float64, _ROW, _WIDE))
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


@njit_fastmath(int64(_ROW, float64), int64(_WIDE, float64))
def draw(weights: Row, point: float) -> int:
    """Index whose interval of the running sum holds ``point``; never one of weight 0.

    Args:
        weights: [n], non-negative with a positive sum.
        point: at least 0. Where rounding left it beyond the sum, the last index with any weight is drawn.
    """
    mass, last = 0.0, -1
    for start in range(0, weights.shape[0], _BLOCK):
        block = weights[start : start + _BLOCK]
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


@njit_fastmath(float64(_ROW, _ROW, float64, _ROW))
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


@njit_fastmath(float64(_ROW, _ROW), float64(_WIDE, _WIDE))
def leave_rest(weights: Row, taken: Row) -> float:
    """Overwrite what is taken by weights - taken, both [n]. Its sum."""
    for i in range(weights.shape[0]):
        taken[i] = weights[i] - taken[i]
    return total(taken)


@njit_fastmath(int64(_WIDE, float64))
def nucleus_size(weights: WideArray, mass_wanted: float) -> int:
    """How many leading weights [n] have less than ``mass_wanted`` before them."""
    mass, size = 0.0, 0
    while size < weights.shape[0] and mass < mass_wanted:
        mass += weights[size]
        size += 1
    return size


@njit_fastmath(void(_ROW, _IDS, int64, int64), void(_WIDE, _IDS, int64, int64))
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


@njit_fastmath(void(_ROW, _IDS), void(_WIDE, _IDS))
def _unheap(values: Row, heap: IdArray) -> None:
    """Turn a whole heap into its ids in the order of rank."""
    for end in range(heap.shape[0] - 1, 0, -1):
        heap[0], heap[end] = heap[end], heap[0]
        _sink(values, heap, 0, end)


@njit_fastmath(_IDS(_ROW, int64), _IDS(_WIDE, int64))
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
    for start in range(count, logits.shape[0], _BLOCK):
        block, least = logits[start : start + _BLOCK], logits[ids[0]]
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


@njit_fastmath(void(_ROW, _ROW, float64), void(_ROW, _WIDE, float64))
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
    for start in range(0, bits.shape[0], _BLOCK):
        if _num_at_least(bits[start : start + _BLOCK], lowest) > 0:
            for i in range(start, min(start + _BLOCK, bits.shape[0])):
                masses[_bin(bits[i])] += weights[i]
    edge, mass = _NUM_BINS - 1, 0.0
    while edge > 0 and mass + masses[edge] < mass_wanted:
        mass += masses[edge]
        edge -= 1
    lowest = np.int32((_LOWEST_BIN + edge) << _BIN_SHIFT) if edge > 0 else np.int32(0)
    above = np.int32((_LOWEST_BIN + edge + 1) << _BIN_SHIFT)
    within, size = np.empty(weights.shape[0], dtype=np.int64), 0
    for start in range(0, bits.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
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
    float64(_ROW, _ROW, float64, float64, float64), float64(_ROW, _WIDE, float64, float64, float64)
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


@njit_exact(float64(_ROW, float64, float64, float64, _ROW))
def write_dense(
    logits: FloatArray, inverse_temperature: float, top_p: float, min_p: float, weights: FloatArray
) -> float:
    """Write the law of a row at a temperature, cut by top-p and min-p.

    Returns:
        The sum of its weights [V]; 0 where there is no law, see ``write_law``.
    """
    mass = write_law(logits, inverse_temperature, weights)
    return truncate(weights, logits, mass, top_p, min_p) if mass > 0.0 else 0.0


@njit_exact(boolean(float64, float64, float64, float64, float64, float64))
def is_kept(
    coin: float,
    lenience: float,
    target_weight: float,
    target_total: float,
    draft_weight: float,
    draft_total: float,
) -> bool:
    """Whether u l q(x) < p(x), each law as the weight of x and the sum of all weights.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1 and, for the lenience l, appendix A.5.
    """
    return coin * lenience * draft_weight * target_total < target_weight * draft_total


@njit_exact(float64(_ROW, _ROW, float64), float64(_WIDE, _WIDE, float64))
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


@njit_exact(int64(_ROW, float64, float64, float64, uint64, int64, int64, _ROWS, _WIDE))
def propose_token(
    logits: FloatArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    seed: int,
    start: int,
    depth: int,
    drafts: FloatArray,
    totals: WideArray,
) -> int:
    """Write the law of a draft token where it is kept, and draw from it.

    Args:
        logits: [n] of the draft, n at most V; where they are not finite, the law is a point mass on token 0.
        inverse_temperature: of the law, as are
        top_p: and
        min_p: see ``write_dense``.
        seed: of the request, 64 bits.
        start: length of the sequence when the round began.
        depth: tokens drafted before.
        drafts: [G, V]; row ``depth`` is overwritten, 0 from n on.
        totals: [G] sums of the rows.
    """
    weights = drafts[depth][: logits.shape[0]]
    mass = write_dense(logits, inverse_temperature, top_p, min_p, weights)
    if mass == 0.0:
        weights[:] = np.float32(0.0)
        weights[0] = _ONE
        mass = 1.0
    drafts[depth][logits.shape[0] :] = np.float32(0.0)
    totals[depth] = mass
    uniform = philox.uniform(seed, philox.ROUND_STREAM, philox.DRAFT_WORD, start + depth, start + 1)
    return draw(weights, uniform * mass)


@njit_exact(
    types.UniTuple(int64, 3)(
        _ROWS, _IDS, _ROWS, _WIDE, float64, float64, float64, float64, uint64, int64,
        _ROW, _ROW, _WIDE,
    )
)  # fmt: skip
def judge_draft(
    logits: FloatArray,
    tokens: IdArray,
    drafts: FloatArray,
    draft_totals: WideArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    lenience: float,
    seed: int,
    start: int,
    weights: FloatArray,
    scratch: FloatArray,
    overlaps: WideArray,
) -> tuple[int, int, int]:
    """Keep sampled draft tokens by the ratio test, and draw the one after them.

    Args:
        logits: [at least G + 1, V] of the target.
        tokens: [G] the draft.
        drafts: [at least G, V] q of each, as ``propose_token`` wrote them.
        draft_totals: [at least G] their sums.
        inverse_temperature: of the target's law, as are
        top_p: and
        min_p: see ``write_dense``.
        lenience: (0, 1]; see ``is_kept``.
        seed: of the request, 64 bits.
        start: length of the sequence when the round began.
        weights: [V] to write in.
        scratch: [V] to write in.
        overlaps: [at least G], overwritten at each position reached: the sum of min(p, q).

    Returns:
        How many tokens are kept, the next one, and 1 if p stood in for a residual of rounding. No next one, -1, where
        logits are not finite.
    """
    stream, round_number = philox.ROUND_STREAM, start + 1
    for i in range(tokens.shape[0]):
        mass = write_dense(logits[i], inverse_temperature, top_p, min_p, weights)
        if mass == 0.0:
            return 0, -1, 0
        shared_mass = write_shared(weights, drafts[i], mass / draft_totals[i], scratch)
        overlaps[i] = shared_mass / mass
        token, target_weight, draft_weight = tokens[i], 0.0, 0.0
        if 0 <= token < weights.shape[0]:
            target_weight, draft_weight = float(weights[token]), float(drafts[i, token])
        coin = philox.uniform(seed, stream, philox.ACCEPT_WORD, start + i, round_number)
        if is_kept(coin, lenience, target_weight, mass, draft_weight, draft_totals[i]):
            continue
        uniform = philox.uniform(seed, stream, philox.RECOVER_WORD, start + i, round_number)
        rest = leave_residual(weights, scratch, mass)
        if rest == 0.0:
            return i, draw(weights, uniform * mass), 1
        return i, draw(scratch, uniform * rest), 0
    gamma = tokens.shape[0]
    mass = write_dense(logits[gamma], inverse_temperature, top_p, min_p, weights)
    if mass == 0.0:
        return 0, -1, 0
    uniform = philox.uniform(seed, stream, philox.BONUS_WORD, start + gamma, round_number)
    return gamma, draw(weights, uniform * mass), 0


@njit_exact(types.UniTuple(int64, 2)(_ROWS, _IDS, float64, float64, float64, uint64, int64, _ROW))
def match_draft(
    logits: FloatArray,
    tokens: IdArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    seed: int,
    start: int,
    weights: FloatArray,
) -> tuple[int, int]:
    """Draw the target's own token at each position, as long as the draft agrees.

    Args:
        logits: [at least G + 1, V] of the target.
        tokens: [G] the draft.
        inverse_temperature: of the target's law, as are
        top_p: and
        min_p: see ``write_dense``.
        seed: of the request, 64 bits.
        start: length of the sequence.
        weights: [V] to write in.

    Returns:
        How many tokens are kept, and the next one; -1 where logits are not finite.
    """
    gamma, drawn = tokens.shape[0], -1
    for i in range(gamma + 1):
        mass = write_dense(logits[i], inverse_temperature, top_p, min_p, weights)
        if mass == 0.0:
            return 0, -1
        uniform = philox.uniform(seed, philox.MATCH_STREAM, philox.MATCH_WORD, start + i, 0)
        drawn = draw(weights, uniform * mass)
        if i == gamma or drawn != tokens[i]:
            return i, drawn
    return gamma, drawn


@njit_exact(void(_BATCH, int64[:, ::1], int64, int64))
def propose_greedy(logits: FloatArray, table: IdArray, count: int, vocab_size: int) -> None:
    """Write each row's greatest token, 0 where its logits are not finite.

    Args:
        logits: [B, at least 1, at least V] of the draft; column 0 of each row is used.
        table: as for ``judge_greedy``; reads ROW, writes TOKEN.
        count: of rows.
        vocab_size: V of the target.

    Raises:
        IndexError: there is no such row.
    """
    for row in range(count):
        if table[row, ROW] >= logits.shape[0]:
            raise IndexError("there are no such logits")
        table[row, TOKEN] = max(greatest(logits[table[row, ROW], 0, :vocab_size]), 0)


@njit_exact(void(_BATCH, int64[:, ::1], int64))
def judge_greedy(logits: FloatArray, table: IdArray, count: int) -> None:
    """Keep each row's draft tokens as long as they are the greatest.

    Args:
        logits: [B, at least G + 1, V] of the target.
        table: [at least ``count``, DRAFT + G] whose columns are the row of ``logits`` (ROW), the tokens drafted
            (DRAFTED) and from DRAFT on the draft itself; written are how many of them are kept (KEPT) and the next
            token, -1 where logits are not finite (TOKEN).
        count: of rows.

    Raises:
        IndexError: there is no such row, it has fewer columns, or the table has no room for the draft.
    """
    for row in range(count):
        at, gamma = table[row, ROW], table[row, DRAFTED]
        if at >= logits.shape[0] or gamma >= logits.shape[1]:
            raise IndexError("there are no such logits")
        if gamma > table.shape[1] - DRAFT:
            raise IndexError("the draft is longer than any")
        for i in range(gamma + 1):
            best = greatest(logits[at, i])
            table[row, KEPT], table[row, TOKEN] = i, best
            if best < 0:
                table[row, KEPT] = 0
                break
            if i < gamma and best != table[row, DRAFT + i]:
                break
