"""Probabilities of the next token from one row of logits and sampling parameters, slow and clear.

Every fast sampler is tested against this definition. It walks the vocabulary in plain Python and float64, shares no
code with the samplers in ``engines`` and knows no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from outrider.engines.base import IntArray
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.oracle.verification import Probs, point_mass

_BANNED = -math.inf


def adjusted_probs(
    logits: npt.ArrayLike,
    params: SamplingParams,
    history: IntArray,
    num_prompt: int,
    mask: Sequence[int] | None = None,
) -> Probs:
    """Return the probabilities of the token after ``history``.

    Args:
        logits: [V] real; -inf bans a token.
        params: applied in the order that ``SamplingParams`` states.
        history: [n] int64, prompt, output and draft tokens before this position.
        num_prompt: leading tokens of ``history`` that are prompt.
        mask: [at least ceil(V / 32)] words of which bit t % 32 of word t // 32 says whether token t may follow; None
            where every token may.

    Returns:
        [V] float64, sums to 1.

    Raises:
        ValueError: the row holds NaN or +inf, or bans every token.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), section 2.2: every sampling method is plain sampling from an
    adjusted distribution.
    """
    scores = processed_scores(logits, params, history, num_prompt, mask)
    if params.is_greedy:
        return point_mass(scores.index(max(scores)), len(scores))
    scores = [score / params.temperature for score in scores]
    scores = _keep(scores, _top_k_ids(scores, params.top_k))
    probs = softmax(scores)
    row_maximum = max(probs)
    kept = {t for t in _top_p_ids(probs, params.top_p) if probs[t] >= params.min_p * row_maximum}
    mass = math.fsum(probs[token] for token in kept)
    return np.array([probs[t] / mass if t in kept else 0.0 for t in range(len(probs))])


def processed_scores(
    logits: npt.ArrayLike,
    params: SamplingParams,
    history: IntArray,
    num_prompt: int,
    mask: Sequence[int] | None = None,
) -> list[float]:
    """Return the logits after mask, bans, bias and penalties, before the temperature; arguments as ``adjusted_probs``.

    Raises:
        ValueError: the row holds NaN or +inf, or bans every token.
    """
    scores = [float(value) for value in np.asarray(logits)]
    _check_finite(scores)
    everything = [int(token) for token in history]
    output = everything[num_prompt:]
    if mask is not None:
        scores = [s if _may_follow(t, mask) else _BANNED for t, s in enumerate(scores)]
    for token in range(len(scores)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            scores[token] = _BANNED
    for word in params.bad_words:
        if _ends_with(output, word[:-1]):
            scores[word[-1]] = _BANNED
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in set(everything):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    if len(output) < params.min_tokens:
        unended = _keep(scores, set(range(len(scores))) - set(params.end_token_ids))
        has_others = max(unended) > _BANNED
        # A mask may leave the end tokens alone.
        scores = unended if has_others or mask is None else scores
    _check_finite(scores)
    scores = _without_repeats(scores, params.no_repeat_ngram_size, everything)
    return _within_deviations(scores, params.top_n_sigma) if params.top_n_sigma > 0.0 else scores


def softmax(scores: Sequence[float]) -> list[float]:
    """Return probabilities proportional to exp(score); at least one score is finite."""
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _check_finite(scores: Sequence[float]) -> None:
    if any(math.isnan(score) for score in scores) or not math.isfinite(max(scores)):
        raise ValueError("a row of logits is not finite")


def _without_repeats(scores: list[float], size: int, tokens: list[int]) -> list[float]:
    """Return the scores with -inf for tokens that complete an n-gram again, unless no other token is left."""
    known = (
        {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)} if size else set()
    )
    ending = tokens[len(tokens) - size + 1 :]
    banned = [_BANNED if (*ending, token) in known else score for token, score in enumerate(scores)]
    return banned if max(banned) > _BANNED else scores


def _within_deviations(scores: list[float], most: float) -> list[float]:
    """Return the scores with -inf for those that lie more than ``most`` standard deviations below the greatest."""
    finite = [score for score in scores if score > _BANNED]
    mean = math.fsum(finite) / len(finite)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in finite) / len(finite))
    least = max(finite) - most * deviation
    return [score if score >= least else _BANNED for score in scores]


def _may_follow(token: int, mask: Sequence[int]) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _ends_with(tokens: Sequence[int], ending: Sequence[int]) -> bool:
    return list(tokens[len(tokens) - len(ending) :]) == list(ending)


def _by_rank(values: Sequence[float]) -> list[int]:
    """Return ids by descending value, ties by lower id."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def _top_k_ids(scores: Sequence[float], top_k: int) -> list[int]:
    is_off = top_k == 0 or top_k >= len(scores)
    return list(range(len(scores))) if is_off else _by_rank(scores)[:top_k]


def _top_p_ids(probs: Sequence[float], top_p: float) -> list[int]:
    """Return the ids kept while the mass before them is below ``top_p``; 1 is off."""
    kept: list[int] = []
    mass_before = 0.0
    for token in _by_rank(probs):
        if kept and top_p < 1.0 and mass_before >= top_p:
            break
        kept.append(token)
        mass_before += probs[token]
    return kept


def _keep(scores: Sequence[float], ids: Collection[int]) -> list[float]:
    kept = set(ids)
    return [score if token in kept else _BANNED for token, score in enumerate(scores)]
