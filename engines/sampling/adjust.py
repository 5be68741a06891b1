"""Adjusted probabilities, fast: a row of logits and a sampling law in, the law of the next token out.

The numpy implementation that serves on the CPU; the slow oracle it is held to is ``runtime.oracle.sampling``. Draft and
target rows pass through these same functions. Rows without processors stay float32; rows with processors are float64,
so that a bias or penalty does not round before the temperature magnifies it.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.sampling import kernels
from outrider.engines.sampling.base import SamplingLaw, SamplingRow
from outrider.engines.sampling.kernels import Row as Logits
from outrider.engines.sampling.token_probs import TokenLaw


def logits_at(logits: FloatArray, row: SamplingRow, num_drafted: int) -> Logits:
    """One row of logits after bans, bias and penalties, for history plus ``num_drafted`` draft tokens (J2)."""
    if not row.law.has_processors:
        return logits
    tentative = np.array(row.draft_tokens[:num_drafted], dtype=np.int64)
    history = np.concatenate([row.history, tentative])
    return process_logits(logits, row.law, history, row.num_prompt)


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
    if not law.has_processors:
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
    # A token that occurs twice is read twice before either is written, so it is changed once.
    if law.repetition_penalty != 1.0:
        seen = history[history < vocab_size]
        values = processed[seen]
        penalty = law.repetition_penalty
        processed[seen] = np.where(values > 0.0, values / penalty, values * penalty)
    if law.presence_penalty != 0.0 or law.frequency_penalty != 0.0:
        produced = output[output < vocab_size]
        processed[produced] -= law.presence_penalty
        np.subtract.at(processed, produced, law.frequency_penalty)  # once per occurrence


def greatest_token(logits: Logits) -> int | None:
    """Lowest id of the greatest logit; None where the row holds NaN, +inf or nothing but -inf."""
    token = int(logits.argmax())
    return token if math.isfinite(logits[token]) else None


def adjusted_law(logits: Logits, law: SamplingLaw, row: FloatArray) -> TokenLaw | None:
    """The law of the next token at a temperature above 0.

    Args:
        logits: [V] float32 or float64, after ``process_logits``; -inf bans.
        law: temperature, top-k, top-p and min-p are applied, in this order.
        row: [at least V] float32, overwritten; a dense law lies in it.

    Returns:
        None where the logits hold NaN, +inf or nothing but -inf.
    """
    dense, inverse_temperature = row[: len(logits)], law.inverse_temperature
    if 0 < law.top_k < len(logits):
        if greatest_token(logits) is None:
            return None
        ids = kernels.ranked_greatest(logits, law.top_k)
        return _cut(ids, kernels.few_weights(logits, ids, inverse_temperature), law)
    if logits.itemsize == dense.itemsize:
        narrow = cast(FloatArray, logits)
        mass = kernels.write_dense(narrow, inverse_temperature, law.top_p, law.min_p, dense)
        return TokenLaw(dense, None, mass) if mass > 0.0 else None
    token = greatest_token(logits)
    if token is None:
        return None
    kernels.write_weights(logits, float(logits[token]), inverse_temperature, dense)
    mass = kernels.truncate(dense, logits, kernels.total(dense), law.top_p, law.min_p)
    return TokenLaw(dense, None, mass)


def _cut(ids: IntArray, weights: npt.NDArray[np.float64], law: SamplingLaw) -> TokenLaw:
    """What top-p and min-p leave of ids in descending order of weight; at least one."""
    num_kept = len(ids)
    if law.top_p < 1.0:
        num_kept = kernels.nucleus_size(weights, law.top_p * kernels.total(weights))
    if law.min_p > 0.0:
        num_kept = min(num_kept, int(np.count_nonzero(weights >= law.min_p)))
    return TokenLaw(weights[:num_kept], ids[:num_kept])
