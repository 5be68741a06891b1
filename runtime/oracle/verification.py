"""The draft tokens that the target keeps, and the distribution of the token after them: the definition, in float64.

Pure functions of probabilities and given random numbers. They draw no noise and know no engine, request or device. The
samplers in ``engines`` are tested against them. ``emitted_probs`` turns them into exact distributions, so that "the
output has the target's distribution" is checked by enumeration.

Symbols: p is target_probs, q is draft_probs, u is a uniform, l is lenience (Leviathan et al. 2023; in Chen et al. 2023
the letters p and q are swapped).

Why it is exact, at one position: x is drafted and kept with mass q(x) min(1, p(x)/q(x)) = min(p, q)(x); the rest of the
mass, 1 - sum min(p, q), is drawn from (p - q)+ divided by exactly that; together p. The next position is judged only
when this one was kept, which was decided before it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
from outrider.engines.base import IntArray

Probs = npt.NDArray[np.float64]
RowOf = Callable[[tuple[int, ...]], Probs]
Judged = Callable[[IntArray, Probs, Probs], Iterable[tuple[float, int, Probs]]]

# A residual of less mass than this is rounding of two equal rows.
SMALLEST_RESIDUAL = 1e-12


def count_accepted(
    draft_tokens: IntArray,
    draft_probs: Probs,
    target_probs: Probs,
    uniforms: Probs,
    *,
    lenience: float = 1.0,
) -> int:
    """Return the length of the draft prefix that the target keeps.

    Token x survives with probability min(1, p(x) / (l q(x))); comparing u * l * q(x) < p(x) needs no division, and the
    strict comparison never keeps a token the target cannot emit, even at u = 0.

    Args:
        draft_tokens: [G] int64.
        draft_probs: [G, V] float64, rows sum to 1; a point mass on the draft token for retrieved drafts.
        target_probs: [G + 1, V] float64, rows sum to 1.
        uniforms: [G] float64 in [0, 1), one coin per draft token.
        lenience: l in (0, 1]; 1 is exact, less accepts more and is not.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; l: appendix A.5.
    """
    position = np.arange(len(draft_tokens))
    proposed = draft_probs[position, draft_tokens]
    wanted = target_probs[position, draft_tokens]
    survives = uniforms * lenience * proposed < wanted
    return int(np.cumprod(survives).sum())


def next_token_probs(num_accepted: int, draft_probs: Probs, target_probs: Probs) -> Probs:
    """Return the probabilities [V] of the token the target adds: the residual after a rejection, else the bonus row.

    The residual is the same at every lenience: norm((p - q)+) is the choice that stays closest to p and keeps every
    token at or below p / l.

    Args:
        num_accepted: from ``count_accepted``.
        draft_probs: [G, V] float64, rows sum to 1.
        target_probs: [G + 1, V] float64, rows sum to 1.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1.
    """
    target: Probs = target_probs[num_accepted]
    if num_accepted == len(draft_probs):
        return target
    residual: Probs = np.maximum(target - draft_probs[num_accepted], 0.0)
    mass = residual.sum()
    if mass <= SMALLEST_RESIDUAL:
        return target
    normalised: Probs = residual / mass
    return normalised


def count_matches(draft_tokens: IntArray, target_tokens: IntArray) -> int:
    """Return the length of the draft prefix that equals the target's own draws; the next draw is emitted after it.

    Exact for any draft, because the emitted tokens are the target's draws. Each position must be drawn once, and the
    draw at the first mismatch emitted, not repeated.

    Args:
        draft_tokens: [G] int64.
        target_tokens: [G + 1] int64, one draw (or argmax) per target row.
    """
    agrees = draft_tokens == target_tokens[: len(draft_tokens)]
    return int(np.cumprod(agrees).sum())


def count_accepted_greedy(
    draft_tokens: IntArray, target_probs: Probs, *, lenience: float = 1.0
) -> int:
    """Return the length of the draft prefix that a greedy target keeps; the next row's argmax is emitted after it.

    Args:
        draft_tokens: [G] int64.
        target_probs: [G + 1, V] float64, the softmax at temperature 1 after bans and penalties, before the argmax.
        lenience: l in (0, 1]; below 1 a token of probability l max p is kept. At 1 only the lowest id of the greatest
            probability is; the inequality alone would keep every token of a tie.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix A.5.
    """
    position = np.arange(len(draft_tokens))
    rows = target_probs[: len(draft_tokens)]
    survives = draft_tokens == rows.argmax(axis=1)
    if lenience < 1.0:
        survives = survives | (rows[position, draft_tokens] >= lenience * rows.max(axis=1))
    return int(np.cumprod(survives).sum())


def gumbel_race(exponentials: Probs, probs: Probs) -> int:
    """Return the token of least E(x) / p(x), ties by lower id.

    It has distribution p, and equal noise makes similar distributions agree often.

    Args:
        exponentials: [V] float64, positive: independent standard exponentials.
        probs: [V] float64, sums to 1.

    Source: the exponential race, which is the Gumbel-max trick with E = exp(-Gumbel).
    """
    times = [e / p if p > 0.0 else np.inf for e, p in zip(exponentials, probs, strict=True)]
    return int(np.argmin(times))


def race_agreement(draft_probs: Probs, target_probs: Probs) -> float:
    """Return the probability that two races under the same exponentials have the same winner.

    Args:
        draft_probs: [V] float64, sums to 1.
        target_probs: [V] float64, sums to 1.

    Returns:
        sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x)), over tokens that both can emit.
    """
    agreement = 0.0
    for token in np.flatnonzero((draft_probs > 0.0) & (target_probs > 0.0)):
        rates = np.maximum(target_probs / target_probs[token], draft_probs / draft_probs[token])
        agreement += 1.0 / float(rates.sum())
    return agreement


def point_mass(token: int, vocab_size: int) -> Probs:
    """Return [V] float64 with all mass on ``token``; without mass where the token is outside the vocabulary."""
    row = np.zeros(vocab_size)
    row[token : token + 1] = 1.0
    return row


def emitted_probs(
    draft_row: RowOf, target_row: RowOf, gamma: int, *, lenience: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of a round's tokens; see ``run_probs``.

    Args:
        draft_row: [V] float64 probabilities of a draft token, given the tokens drafted before it.
        target_row: [V] float64 probabilities of the target, given the same.
        gamma: draft tokens of the round.
        lenience: l in (0, 1].
    """

    def judged(
        tokens: IntArray, draft_probs: Probs, target_probs: Probs
    ) -> Iterator[tuple[float, int, Probs]]:
        position = np.arange(len(tokens))
        cuts = target_probs[position, tokens] / (lenience * draft_probs[position, tokens])
        for coins, volume in coin_cells(cuts):
            kept = count_accepted(tokens, draft_probs, target_probs, coins, lenience=lenience)
            yield volume, kept, next_token_probs(kept, draft_probs, target_probs)

    return run_probs(draft_row, target_row, gamma, judged)


def run_probs(
    draft_row: RowOf, target_row: RowOf, gamma: int, judged: Judged
) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of a round's tokens, over every draft and every outcome of its judgement.

    Args:
        draft_row: [V] float64 probabilities of a draft token, given the tokens drafted before it.
        target_row: [V] float64 probabilities of the target, given the same.
        gamma: draft tokens of the round, small: V ** gamma drafts are visited.
        judged: from draft tokens [G], draft rows [G, V] and target rows [G + 1, V] to each outcome over the coins: its
            probability, the number of tokens it keeps, and the probabilities [V] of the next one.

    Returns:
        Emitted run (accepted tokens and the one after them) -> probability; zero-probability runs are left out.
    """
    probs: dict[tuple[int, ...], float] = {}
    vocab_size = len(target_row(()))
    for draft in product(range(vocab_size), repeat=gamma):
        prefixes = [draft[:length] for length in range(gamma + 1)]
        draft_probs = np.array([draft_row(p) for p in prefixes[:-1]]).reshape(gamma, vocab_size)
        target_probs = np.array([target_row(p) for p in prefixes])
        tokens = np.array(draft, dtype=np.int64)
        probability = float(np.prod(draft_probs[np.arange(gamma), tokens]))
        if probability == 0.0:
            continue
        for volume, kept, next_probs in judged(tokens, draft_probs, target_probs):
            for token in np.flatnonzero(next_probs):
                run = (*draft[:kept], int(token))
                mass = probability * volume * float(next_probs[token])
                probs[run] = probs.get(run, 0.0) + mass
    return probs


def coin_cells(cuts: Probs) -> Iterator[tuple[Probs, float]]:
    """Yield midpoint and volume of every cell of the coins' cube [0, 1)^G, coin i cut at ``cuts[i]``.

    Args:
        cuts: [G] float64, where the outcome of a coin changes; at least 0, beyond 1 is no cut.
    """
    intervals = [
        [(low, high) for low, high in pairwise([0.0, cut, 1.0]) if high > low]
        for cut in np.minimum(1.0, cuts).tolist()
    ]
    for cell in product(*intervals):
        midpoint = np.array([(low + high) / 2 for low, high in cell])
        yield midpoint, float(np.prod([high - low for low, high in cell]))


def sequence_probs(target_row: RowOf, length: int) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of the target's first ``length`` tokens, plain sampling; visits V ** length runs.

    Args:
        target_row: [V] float64 probabilities of a token, given the tokens before it.
        length: tokens.
    """
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        probs = {
            (*prefix, token): mass * float(share)
            for prefix, mass in probs.items()
            for token, share in enumerate(target_row(prefix))
        }
    return probs


def completed(
    runs: Mapping[tuple[int, ...], float], target_row: RowOf, length: int
) -> dict[tuple[int, ...], float]:
    """Return the distribution of ``length`` tokens when the target continues shorter runs.

    Args:
        runs: emitted by a round, see ``run_probs``; none is longer than ``length``.
        target_row: as of ``sequence_probs``.
        length: tokens.
    """
    probs: dict[tuple[int, ...], float] = {}
    for run, mass in runs.items():

        def continued(more: tuple[int, ...], run: tuple[int, ...] = run) -> Probs:
            return target_row((*run, *more))

        for tail, share in sequence_probs(continued, length - len(run)).items():
            probs[*run, *tail] = probs.get((*run, *tail), 0.0) + mass * share
    return probs
