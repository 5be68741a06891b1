"""Adjusted probabilities, fast: a row of logits and sampling parameters in, the next token's distribution out.

The numpy implementation that serves on the CPU; the slow oracle it is held to is ``runtime.oracle.sampling``. Draft and
target rows pass through these same functions. Rows without processors stay float32, masked or not; rows with processors
are float64, so that a bias or penalty does not round before the temperature magnifies it.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.sampling import kernels, truncation
from outrider.engines.sampling.base import IntArray32, SamplingParams, SamplingRow
from outrider.engines.sampling.kernels import Row as Logits
from outrider.engines.sampling.token_probs import TokenProbs


def logits_at(
    logits: FloatArray, row: SamplingRow, num_drafted: int, *, node: int | None = None
) -> Logits:
    """Return one row of logits after mask, bans, bias and penalties, for history plus some draft tokens (J2).

    Args:
        logits: [V] float32, left unchanged.
        row: whose ``draft_tokens`` lead there.
        num_drafted: of them that come before this position.
        node: row of the masks; None for the one of the position.
    """
    masks = row.masks
    if masks is None and not row.params.has_processors:
        return logits
    mask = None if masks is None else masks[num_drafted if node is None else node]
    tentative = np.array(row.draft_tokens[:num_drafted], dtype=np.int64)
    history = np.concatenate([row.history, tentative])
    return process_logits(logits, row.params, history, row.num_prompt, mask)


def process_logits(
    logits: FloatArray,
    params: SamplingParams,
    history: IntArray,
    num_prompt: int,
    mask: IntArray32 | None = None,
) -> Logits:
    """Return logits after mask, bans, bias and penalties, computed afresh for exactly this prefix.

    No state is carried between rows, so a rejected draft token leaves nothing behind.

    Args:
        logits: [V] float32, left unchanged.
        params: ids at or beyond V are ignored, so that a smaller draft vocabulary may share the target's parameters.
        history: [n] int64, prompt, output and the draft tokens before this position.
        num_prompt: leading tokens of ``history`` that are prompt.
        mask: [at least ceil(V / 32)] int32, a row of ``SamplingRow.masks``; None where every token may follow.

    Returns:
        [V] float64 with processors, float32 with a mask alone, or ``logits`` itself with neither.
    """
    if not params.has_processors:
        if mask is None:
            return logits
        masked = np.empty_like(logits)
        kernels.write_masked(logits, mask, masked)
        return masked
    if mask is None:
        processed = logits.astype(np.float64)
    else:
        processed = np.empty(len(logits))
        kernels.write_masked(logits, mask, processed)
    output = history[num_prompt:]
    _ban(processed, params, output)
    for token, bias in params.logit_bias:
        if token < len(processed):
            processed[token] += bias
    _penalise(processed, params, history, output)
    if len(output) < params.min_tokens:
        ends = [token for token in params.end_token_ids if token < len(processed)]
        if mask is None:
            processed[ends] = -np.inf
        else:  # it may leave the end tokens alone
            _ban_unless_all(processed, np.array(ends, dtype=np.int64))
    if params.no_repeat_ngram_size > 0:
        _ban_unless_all(processed, ngram_ends(history, params.no_repeat_ngram_size))
    if params.top_n_sigma > 0.0:
        finite = processed[np.isfinite(processed)]
        if len(finite):
            processed[processed < finite.max() - params.top_n_sigma * finite.std()] = -np.inf
    return processed


def ngram_ends(tokens: IntArray, size: int) -> IntArray:
    """Return the tokens after which the last ``size`` tokens would be ones that ``tokens`` has already.

    Args:
        tokens: [n] int64.
        size: at least 1; of size 1 every token repeats.

    Returns:
        [any] int64, some perhaps twice.

    Source: ``NoRepeatNGramLogitsProcessor`` of Transformers.
    """
    if len(tokens) < size:
        return tokens[:0]
    if size == 1:
        return tokens
    # Places whose token follows the last one elsewhere; each further token of the n-gram leaves fewer of them.
    places = np.flatnonzero(tokens[size - 2 : -1] == tokens[-1]) + size - 1
    for back in range(2, size):
        places = places[tokens[places - back] == tokens[-back]]
    return tokens[places]


def _ban_unless_all(processed: npt.NDArray[np.float64], tokens: IntArray) -> None:
    """Ban tokens, but none where no other is left."""
    tokens = tokens[tokens < len(processed)]
    kept = processed[tokens]
    processed[tokens] = -np.inf
    if len(tokens) and processed.max() == -np.inf:
        processed[tokens] = kept


def _ban(processed: npt.NDArray[np.float64], params: SamplingParams, output: IntArray) -> None:
    vocab_size = len(processed)
    if params.allowed_token_ids:
        allowed = np.array([t for t in params.allowed_token_ids if t < vocab_size], dtype=np.int64)
        kept = processed[allowed]
        processed[:] = -np.inf
        processed[allowed] = kept
    for word in params.bad_words:
        num_before = len(word) - 1
        is_due = (
            len(output) >= num_before and tuple(output[len(output) - num_before :]) == word[:-1]
        )
        if is_due and word[-1] < vocab_size:
            processed[word[-1]] = -np.inf


def _penalise(
    processed: npt.NDArray[np.float64], params: SamplingParams, history: IntArray, output: IntArray
) -> None:
    vocab_size = len(processed)
    # A token that occurs twice is read twice before either is written, so it is changed once.
    if params.repetition_penalty != 1.0:
        seen = history[history < vocab_size]
        values = processed[seen]
        penalty = params.repetition_penalty
        processed[seen] = np.where(values > 0.0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        produced = output[output < vocab_size]
        processed[produced] -= params.presence_penalty
        np.subtract.at(processed, produced, params.frequency_penalty)  # once per occurrence


def greatest_token(logits: Logits) -> int | None:
    """Return the lowest id of the greatest logit; None where the row holds NaN, +inf or nothing but -inf."""
    token = int(logits.argmax())
    return token if math.isfinite(logits[token]) else None


def adjusted_token_probs(
    logits: Logits, params: SamplingParams, row: FloatArray
) -> TokenProbs | None:
    """Return the distribution of the next token at a temperature above 0.

    Args:
        logits: [V] float32 or float64, after ``process_logits``; -inf bans.
        params: temperature, top-k, top-p and min-p are applied, in this order.
        row: [at least V] float32, overwritten; dense weights lie in it.

    Returns:
        None where the logits hold NaN, +inf or nothing but -inf.
    """
    dense, inverse_temperature = row[: len(logits)], params.inverse_temperature
    if 0 < params.top_k < len(logits):
        if greatest_token(logits) is None:
            return None
        ids = truncation.ranked_greatest(logits, params.top_k)
        return _cut(ids, kernels.few_weights(logits, ids, inverse_temperature), params)
    if logits.itemsize == dense.itemsize:
        narrow = cast(FloatArray, logits)
        mass = truncation.write_dense(
            narrow, inverse_temperature, params.top_p, params.min_p, dense
        )
        return TokenProbs(dense, None, mass) if mass > 0.0 else None
    token = greatest_token(logits)
    if token is None:
        return None
    kernels.write_weights(logits, float(logits[token]), inverse_temperature, dense)
    mass = truncation.truncate(dense, logits, kernels.total(dense), params.top_p, params.min_p)
    return TokenProbs(dense, None, mass)


def _cut(ids: IntArray, weights: npt.NDArray[np.float64], params: SamplingParams) -> TokenProbs:
    """Cut ids in descending order of weight by top-p and min-p; at least one is left."""
    num_kept = len(ids)
    if params.top_p < 1.0:
        num_kept = truncation.nucleus_size(weights, params.top_p * kernels.total(weights))
    if params.min_p > 0.0:
        num_kept = min(num_kept, int(np.count_nonzero(weights >= params.min_p)))
    return TokenProbs(weights[:num_kept], ids[:num_kept])
