"""Races over a row of weights, and raw log-probabilities.

Pure functions of rows and numbers; no noise is drawn here.
"""

from __future__ import annotations

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling import truncation
from outrider.engines.sampling.base import TokenLogprobs
from outrider.engines.sampling.kernels import Row


def in_place(logits: FloatArray) -> FloatArray:
    """Return logits as the compiled loops take them: where they lie if they can be read there, else a copy.

    The loops write to no logits, but they are compiled for float32 without gaps, in memory that may be written to.

    Args:
        logits: [..., V] of any engine.
    """
    # In order, aligned and writable.
    are_readable = logits.dtype == np.float32 and logits.flags.carray
    return logits if are_readable else np.array(logits, dtype=np.float32, order="C")


def race_winner(weights: Row, exponentials: FloatArray) -> int:
    """Return the index x of least E(x) / w(x), which is distributed as the weights are; ties by lower index.

    Args:
        weights: [V], non-negative with a positive sum.
        exponentials: [V] float32, positive: independent standard exponentials.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return int(np.divide(exponentials, weights).argmin())


def raw_logprobs(logits: FloatArray, token: int, num_top: int) -> TokenLogprobs:
    """Return one unadjusted row's log-softmax at ``token`` and at its ``num_top`` greatest entries, ties by lower id.

    Args:
        logits: [V] float32, finite maximum.
        token: emitted id.
        num_top: entries to report, 0..V.
    """
    norm = log_norm(logits)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = truncation.ranked_greatest(logits, min(num_top, len(logits)))
        top = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprobs(logprob=float(logits[token]) - norm, top=top)


def log_norm(logits: FloatArray) -> float:
    """Return the logarithm of the sum of the exponentials: a token's log-probability is its logit less this.

    Args:
        logits: [V] float32, finite maximum.
    """
    peak = float(logits.max())
    return peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))


def choices_of(logits: FloatArray, count: int) -> tuple[tuple[int, ...], ...]:
    """Return per row the ``count`` tokens of greatest logit, greatest first, ties by lower id.

    Args:
        logits: [R, V] float32.
        count: at least 1; at most V are given.
    """
    if count == 1:
        return tuple((token,) for token in logits.argmax(axis=-1).tolist())
    count = min(count, logits.shape[-1])
    return tuple(tuple(truncation.ranked_greatest(row, count).tolist()) for row in logits)
