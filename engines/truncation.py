"""Which tokens top-k and top-p keep, without sorting the vocabulary.

A full sort of 151,936 logits costs more than the model. Ranks are therefore only taken among candidates that provably
contain the answer: those at or above a threshold, found from maxima of columns or from a histogram of weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engines.base import FloatArray, IntArray

Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Weights = npt.NDArray[np.float32] | npt.NDArray[np.float64]

# Below this a stable sort of everything is the fastest way.
SMALL_VOCABULARY = 1024
# A peaked row's nucleus is among so many greatest tokens.
_PEAKED_SIZE = 256
_COLUMN_LENGTHS = (64, 16, 4)
# A larger nucleus is found by a histogram of the float32 bit patterns of at most so many weights, 64
# bins to the octave. A sample's quantile is off by a few bins: the slacks cover it, and what they cover is verified.
_HISTOGRAM_SIZE = 8192
_BIN_SHIFT = 17
_SAMPLE_SLACKS = (3, 16)
_LOWEST_BIN = int(np.float32(2.0**-30).view(np.int32)) >> _BIN_SHIFT


def ranked_greatest(logits: Logits, count: int) -> IntArray:
    """Ids of exactly ``count`` greatest logits, [count] int64 by descending logit, ties by lower id.

    Args:
        logits: [V], no NaN.
        count: 1..V.
    """
    candidates = _candidates(logits, count)
    values = logits[candidates]
    if len(candidates) > max(SMALL_VOCABULARY, 2 * count):
        position = len(values) - count
        is_kept = values >= np.partition(values, position)[position]
        candidates, values = candidates[is_kept], values[is_kept]
    ranked: IntArray = candidates[np.argsort(-values, kind="stable")[:count]]
    return ranked


def nucleus_size(weights: Weights, mass_wanted: float, *, mass_before: float = 0.0) -> int:
    """How many leading tokens have less than ``mass_wanted`` before them.

    Args:
        weights: [n] in descending order of rank.
        mass_wanted: top_p in units of the weights.
        mass_before: mass of the tokens ranked before the first.
    """
    mass = np.add.accumulate(weights, dtype=np.float64)
    mass += mass_before
    return int(mass_before < mass_wanted) + int(mass[:-1].searchsorted(mass_wanted))


def candidate_count(vocab_size: int, mass_wanted: float) -> int | None:
    """How many greatest tokens to look for the nucleus in; None where the whole row is as cheap, or so few cannot do.

    Args:
        vocab_size: V.
        mass_wanted: in units of the greatest weight, so that n tokens hold at most n.
    """
    if vocab_size <= SMALL_VOCABULARY:
        return vocab_size
    is_worth_it = vocab_size > _HISTOGRAM_SIZE and mass_wanted <= _PEAKED_SIZE
    return _PEAKED_SIZE if is_worth_it else None


def keep_nucleus(weights: FloatArray, logits: Logits, mass_wanted: float) -> None:
    """Set to 0 all weights outside the nucleus, in place; for nuclei of many tokens.

    Args:
        weights: [V] float32 in [0, 1], monotone in the logits.
        logits: [V], to rank by.
        mass_wanted: top_p times the sum of the weights.
    """
    for low, high in _brackets(weights, mass_wanted):
        is_above = weights >= high
        mass_above = float(np.add.reduce(weights * is_above))
        if mass_above >= mass_wanted:
            continue
        ids = ((weights >= low) > is_above).nonzero()[0]
        between = weights[ids]
        if low > 0.0 and mass_above + float(np.add.reduce(between)) < mass_wanted:
            continue
        num_kept = nucleus_size(np.sort(between)[::-1], mass_wanted, mass_before=mass_above)
        kept = _greatest_weights(ids, between, logits, num_kept)
        kept_weights = weights[kept]
        weights *= is_above
        weights[kept] = kept_weights
        return


def _greatest_weights(ids: IntArray, values: FloatArray, logits: Logits, count: int) -> IntArray:
    """The ``count`` ids of greatest value; equal values are ranked by logit, then by lower id."""
    smallest = np.partition(values, len(values) - count)[len(values) - count]
    greater = ids[values > smallest]
    equal = ids[values == smallest]
    ranked = equal[np.argsort(-logits[equal], kind="stable")]
    return np.concatenate([greater, ranked[: count - len(greater)]])


def _candidates(logits: Logits, count: int) -> IntArray:
    """Ascending ids that include the ``count`` greatest, usually not many more.

    The count-th greatest of the columns' maxima is a lower bound of the count-th greatest logit.
    """
    for length in _COLUMN_LENGTHS:
        num_columns = len(logits) // length
        if 4 * count <= 3 * num_columns:
            columns = logits[: num_columns * length].reshape(length, num_columns)
            maxima = np.maximum.reduce(columns, axis=0)
            position = num_columns - count
            at_least: IntArray = (logits >= np.partition(maxima, position)[position]).nonzero()[0]
            return at_least
    return np.arange(len(logits))


def _brackets(weights: FloatArray, mass_wanted: float) -> Iterator[tuple[float, float]]:
    """Half-open ranges of weights that should hold the nucleus' smallest; the last one holds everything.

    The mass left out is what a sample estimates well: it is spread over many small weights.
    """
    mass_left_out = float(np.add.reduce(weights)) - mass_wanted
    stride = -(-len(weights) // _HISTOGRAM_SIZE)
    if stride > 1:
        for slack in _SAMPLE_SLACKS:
            yield _bracket(weights[::stride], mass_left_out / stride, slack)
    yield _bracket(weights, mass_left_out, 0)
    yield 0.0, np.inf


def _bracket(weights: FloatArray, mass_left_out: float, slack: int) -> tuple[float, float]:
    """The bin in which the mass from below reaches ``mass_left_out``, and ``slack`` bins on either side."""
    bits = np.ascontiguousarray(weights).view(np.int32)
    bins = np.maximum(bits >> _BIN_SHIFT, _LOWEST_BIN)
    first = int(bins.min())
    mass_below = np.bincount(bins - first, weights=weights).cumsum()
    at = first + min(int(mass_below.searchsorted(mass_left_out)), len(mass_below) - 1)
    edges = np.array([at - slack, at + 1 + slack], dtype=np.int32) << _BIN_SHIFT
    low, high = edges.view(np.float32).tolist()
    # What was raised to the lowest bin lies below its edge.
    return (0.0 if at - slack <= first else low), high
