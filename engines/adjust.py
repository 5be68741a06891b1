"""Adjusted probabilities, fast: a row of logits and a sampling law in, the law of the next token out.

The numpy implementation that serves on the CPU; the slow oracle it is held to is ``runtime.core.sampling``. Draft and
target rows pass through these same functions. Rows without processors stay float32; rows with processors are float64,
so that a bias or penalty does not round before the temperature magnifies it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engines.base import FloatArray, IntArray
from engines.laws import SamplingLaw

Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]

# Candidates looked at before top-p sorts a whole row. Peaked rows need far fewer, flat rows take the exact slow path.
PREFILTER_SIZE = 1024
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def has_processors(law: SamplingLaw) -> bool:
    """Whether anything but temperature and truncation changes the logits."""
    return (
        bool(law.allowed_token_ids or law.bad_words or law.logit_bias)
        or law.repetition_penalty != 1.0
        or law.presence_penalty != 0.0
        or law.frequency_penalty != 0.0
        or (law.min_tokens > 0 and bool(law.end_token_ids))
    )


def process_logits(
    logits: FloatArray, law: SamplingLaw, history: IntArray, num_prompt: int
) -> Logits:
    """Logits after bans, bias and penalties, computed afresh for exactly this prefix.

    No state is carried between rows, so a rejected draft token leaves nothing behind.

    Args:
        logits: [V] float32, left unchanged.
        law: ids at or beyond V are ignored, so that a smaller draft vocabulary may share the target's law.
        history: [n] int64, prompt, output and the draft tokens before this position.
        num_prompt: leading tokens of ``history`` that are prompt.

    Returns:
        [V] float64, or ``logits`` itself when the law has no processors.
    """
    if not has_processors(law):
        return logits
    processed = logits.astype(np.float64)
    output = history[num_prompt:]
    _ban(processed, law, output)
    for token, bias in law.logit_bias:
        if token < len(processed):
            processed[token] += bias
    _penalise(processed, law, history, output)
    if len(output) < law.min_tokens:
        processed[[token for token in law.end_token_ids if token < len(processed)]] = -np.inf
    return processed


def _ban(processed: npt.NDArray[np.float64], law: SamplingLaw, output: IntArray) -> None:
    vocab_size = len(processed)
    if law.allowed_token_ids:
        allowed = np.array([t for t in law.allowed_token_ids if t < vocab_size], dtype=np.int64)
        kept = processed[allowed]
        processed[:] = -np.inf
        processed[allowed] = kept
    for word in law.bad_words:
        num_before = len(word) - 1
        is_due = (
            len(output) >= num_before and tuple(output[len(output) - num_before :]) == word[:-1]
        )
        if is_due and word[-1] < vocab_size:
            processed[word[-1]] = -np.inf


def _penalise(
    processed: npt.NDArray[np.float64], law: SamplingLaw, history: IntArray, output: IntArray
) -> None:
    vocab_size = len(processed)
    if law.repetition_penalty != 1.0:
        seen = np.unique(history[history < vocab_size])
        values = processed[seen]
        penalty = law.repetition_penalty
        processed[seen] = np.where(values > 0.0, values / penalty, values * penalty)
    if law.presence_penalty != 0.0 or law.frequency_penalty != 0.0:
        tokens, counts = np.unique(output[output < vocab_size], return_counts=True)
        processed[tokens] -= law.presence_penalty + law.frequency_penalty * counts


def greatest_token(logits: Logits) -> int | None:
    """Lowest id of the greatest logit; None where the row holds NaN, +inf or nothing but -inf."""
    token = int(np.argmax(logits))
    return token if np.isfinite(logits[token]) else None


def adjusted_row(logits: Logits, law: SamplingLaw) -> FloatArray | None:
    """The law of the next token at a temperature above 0.

    Args:
        logits: [V] float32 or float64, after ``process_logits``; -inf bans.
        law: temperature, top-k, top-p and min-p are applied, in this order.

    Returns:
        [V] float32 that sums to 1 up to rounding, or None where the row holds NaN, +inf or nothing but -inf.
    """
    peak = logits.max()
    if not np.isfinite(peak):
        return None
    temperature = max(law.temperature, _SMALLEST_TEMPERATURE)
    # Subtracting before dividing keeps the greatest exponents, which matter, the most precise.
    with np.errstate(
        over="ignore"
    ):  # a finite mask value such as -3e38 may become -inf: no mass either way
        exponents = logits - peak
        exponents /= temperature
    is_top_k = 0 < law.top_k < len(logits)
    if not is_top_k and law.top_p >= 1.0:
        weights = np.exp(exponents, out=exponents)
        if law.min_p > 0.0:
            weights[weights < law.min_p] = 0.0
        weights /= weights.sum(dtype=np.float64)
        untruncated: FloatArray = weights.astype(np.float32, copy=False)
        return untruncated
    kept = _truncated(logits, exponents, law, is_top_k=is_top_k)
    kept_weights = np.exp(exponents[kept].astype(np.float64))
    kept_weights[kept_weights < law.min_p] = 0.0
    probs = np.zeros(len(logits), dtype=np.float32)
    probs[kept] = kept_weights / kept_weights.sum()
    return probs


def greatest_tokens(logits: Logits, count: int) -> IntArray:
    """Ids of exactly ``count`` greatest logits, ties by lower id; [count] int64, ascending ids."""
    vocab_size = len(logits)
    if count >= vocab_size:
        return np.arange(vocab_size)
    threshold = np.partition(logits, vocab_size - count)[vocab_size - count]
    is_kept = logits > threshold
    num_ties = count - int(np.count_nonzero(is_kept))
    is_kept[np.flatnonzero(logits == threshold)[:num_ties]] = True
    return np.flatnonzero(is_kept)


def _truncated(logits: Logits, exponents: Logits, law: SamplingLaw, *, is_top_k: bool) -> IntArray:
    """Ids that top-k and then top-p keep, in any order."""
    if is_top_k:
        candidates = greatest_tokens(logits, law.top_k)
        if law.top_p >= 1.0:
            return candidates
        total = float(np.exp(exponents[candidates].astype(np.float64)).sum())
        return _nucleus(logits, exponents, candidates, law.top_p * total)
    total = float(np.exp(exponents).sum(dtype=np.float64))
    candidates = greatest_tokens(logits, PREFILTER_SIZE)
    kept = _nucleus(logits, exponents, candidates, law.top_p * total)
    is_certain = len(kept) < len(candidates)
    if is_certain or len(candidates) == len(logits):
        return kept
    return _nucleus(logits, exponents, np.arange(len(logits)), law.top_p * total)


def _nucleus(
    logits: Logits, exponents: Logits, candidates: IntArray, mass_wanted: float
) -> IntArray:
    """Candidates whose preceding mass is below ``mass_wanted``; at least one.

    Candidates are ascending ids, so that the stable sort breaks ties by lower id.
    """
    ordered = candidates[np.argsort(-logits[candidates], kind="stable")]
    mass = np.cumsum(np.exp(exponents[ordered].astype(np.float64)))
    num_kept = 1 + int(np.count_nonzero(mass[:-1] < mass_wanted))
    return ordered[:num_kept]
