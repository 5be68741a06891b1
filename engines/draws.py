"""What is done with an adjusted row once there is one: draw from it, race it, subtract a draft row, report it.

Pure numpy functions of rows and numbers; no noise is drawn here.
"""

from __future__ import annotations

import numpy as np

from engines.adjust import greatest_tokens
from engines.base import FloatArray
from engines.laws import TokenLogprobs

# Below this the float32 difference of two rows is rounding, not mass.
SMALLEST_RESIDUAL = 1e-6


def draw_token(probs: FloatArray, uniform: float) -> int:
    """Token whose interval of the cumulative row holds ``uniform``; never one of probability 0.

    Args:
        probs: [V] float32, non-negative with a positive sum; need not be normalised.
        uniform: in [0, 1).
    """
    cumulative = np.cumsum(probs, dtype=np.float64)
    total = cumulative[-1]
    token = int(np.searchsorted(cumulative, uniform * total, side="right"))
    # u * total may round up to total: the last token with any mass owns that point.
    last = int(np.searchsorted(cumulative, total, side="left"))
    return min(token, last)


def race_winner(probs: FloatArray, exponentials: FloatArray) -> int:
    """Token x of least E(x) / p(x), which has law p; ties by lower id.

    Args:
        probs: [V] float32, non-negative with a positive sum.
        exponentials: [V] float32, positive: independent standard exponentials.
    """
    times = np.full(len(probs), np.inf, dtype=np.float64)
    np.divide(exponentials, probs, out=times, where=probs > 0.0)
    return int(times.argmin())


def overlap(target_row: FloatArray, draft_row: FloatArray) -> float:
    """Sum of min(p, q): the probability that a token drawn from q is kept."""
    return float(np.minimum(target_row, draft_row).sum(dtype=np.float64))


def residual_row(target_row: FloatArray, draft_row: FloatArray) -> tuple[FloatArray, bool]:
    """Unnormalised (p - q)+ [V] float32, or p itself, and whether p had to stand in for a residual without mass."""
    residual = np.maximum(target_row - draft_row, 0.0)
    if residual.sum(dtype=np.float64) <= SMALLEST_RESIDUAL:
        return target_row, True
    return residual, False


def raw_logprobs(logits: FloatArray, token: int, num_top: int) -> TokenLogprobs:
    """Log-softmax of one unadjusted row at ``token`` and at its ``num_top`` greatest entries, ties by lower id.

    Args:
        logits: [V] float32, finite maximum.
        token: emitted id.
        num_top: entries to report, 0..V.
    """
    peak = float(logits.max())
    norm = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = greatest_tokens(logits, min(num_top, len(logits)))
        ordered = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - norm) for i in ordered)
    return TokenLogprobs(logprob=float(logits[token]) - norm, top=top)


def choices_of(logits: FloatArray, count: int) -> tuple[tuple[int, ...], ...]:
    """Per row the ``count`` tokens of greatest logit, greatest first, ties by lower id where count is 1.

    Args:
        logits: [R, V] float32.
        count: at least 1; at most V are given.
    """
    if count == 1:
        return tuple((token,) for token in logits.argmax(axis=-1).tolist())
    count = min(count, logits.shape[-1])
    found = np.argpartition(-logits, count - 1, axis=-1)[:, :count]
    found.sort(axis=-1)
    order = np.argsort(-np.take_along_axis(logits, found, axis=-1), axis=-1, kind="stable")
    return tuple(map(tuple, np.take_along_axis(found, order, axis=-1).tolist()))
