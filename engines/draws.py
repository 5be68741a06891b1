"""Drawing one index from a row of weights, and reporting raw log-probabilities.

Pure numpy functions of rows and numbers; no noise is drawn here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engines.base import FloatArray
from engines.laws import TokenLogprobs
from engines.truncation import ranked_greatest

Weights = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Cumulative = npt.NDArray[np.float64]

# A running sum costs 8 ns an element, a sum 1: rows of a multiple of COLUMN_LENGTH are summed by columns first.
COLUMN_LENGTH = 64
_LONGEST_RUNNING_SUM = 512


def padded_size(vocab_size: int) -> int:
    """Smallest multiple of ``COLUMN_LENGTH`` that holds a row of the vocabulary."""
    return -(-vocab_size // COLUMN_LENGTH) * COLUMN_LENGTH


def draw_token(weights: Weights, uniform: float) -> int:
    """Index whose interval of the cumulative weights holds ``uniform``; never one of weight 0.

    The intervals are in the order of the index for short rows, and column by column of the row written as
    [COLUMN_LENGTH, n] for long ones; any order gives the same law.

    Args:
        weights: [V], non-negative with a positive sum; need not be normalised.
        uniform: in [0, 1).
    """
    if len(weights) <= _LONGEST_RUNNING_SUM or len(weights) % COLUMN_LENGTH:
        cumulative = np.add.accumulate(weights, dtype=np.float64)
        return _holder(cumulative, uniform * float(cumulative[-1]))
    columns = weights.reshape(COLUMN_LENGTH, -1)
    cumulative = np.add.accumulate(np.add.reduce(columns, axis=0), dtype=np.float64)
    point = uniform * float(cumulative[-1])
    column = _holder(cumulative, point)
    if column > 0:
        point -= float(cumulative[column - 1])
    within = np.add.accumulate(columns[:, column], dtype=np.float64)
    return _holder(within, point) * columns.shape[1] + column


def race_winner(weights: Weights, exponentials: FloatArray) -> int:
    """Index x of least E(x) / w(x), which has the law of the weights; ties by lower index.

    Args:
        weights: [V], non-negative with a positive sum.
        exponentials: [V] float32, positive: independent standard exponentials.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return int(np.divide(exponentials, weights).argmin())


def raw_logprobs(logits: FloatArray, token: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of one unadjusted row at ``token`` and at its ``num_top`` greatest entries, ties by lower id.

    Args:
        logits: [V] float32, finite maximum.
        token: emitted id.
        num_top: entries to report, 0..V.
    """
    norm = log_norm(logits)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = ranked_greatest(logits, min(num_top, len(logits)))
        top = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprobs(logprob=float(logits[token]) - norm, top=top)


def log_norm(logits: FloatArray) -> float:
    """Logarithm of the sum of the exponentials: a token's log-probability is its logit less this.

    Args:
        logits: [V] float32, finite maximum.
    """
    peak = float(logits.max())
    return peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))


def choices_of(logits: FloatArray, count: int) -> tuple[tuple[int, ...], ...]:
    """Per row the ``count`` tokens of greatest logit, greatest first, ties by lower id.

    Args:
        logits: [R, V] float32.
        count: at least 1; at most V are given.
    """
    if count == 1:
        return tuple((token,) for token in logits.argmax(axis=-1).tolist())
    count = min(count, logits.shape[-1])
    return tuple(tuple(ranked_greatest(row, count).tolist()) for row in logits)


def _holder(cumulative: Cumulative, point: float) -> int:
    """First index whose cumulative weight exceeds ``point``; where rounding left none, the last with any weight."""
    index = int(cumulative.searchsorted(point, side="right"))
    if index < len(cumulative):
        return index
    return int(cumulative.searchsorted(cumulative[-1]))
