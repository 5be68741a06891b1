"""One token's distribution: unnormalised weights over the whole vocabulary, or over the few ids a truncation kept.

Rows stay unnormalised because most are asked for one token's probability or one draw, and stay where they were written
because a row of a large vocabulary is 600 KB. Every operation is a function of the one row, with sums in an order that
its length alone decides: a row has the same bits alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.sampling import kernels
from outrider.engines.sampling.draws import race_winner
from outrider.engines.sampling.kernels import Row, WideArray


@dataclass(slots=True)
class TokenProbs:
    """Weights proportional to the probabilities.

    Attributes:
        weights: dense [V] float32, or [n] float64, one per id.
        ids: [n] int64, distinct, in any order; None for dense.
    """

    weights: Row
    ids: IntArray | None = None
    _total: float | None = field(default=None, compare=False)

    @property
    def dense(self) -> FloatArray:
        """Weights of a distribution without ids."""
        return cast(FloatArray, self.weights)

    @property
    def few(self) -> WideArray:
        """Weights of a distribution with ids."""
        return cast(WideArray, self.weights)

    def total(self) -> float:
        """Return the sum of the weights, which must not change after the first call."""
        if self._total is None:
            self._total = kernels.total(self.weights)
        return self._total

    def weight(self, token: int) -> float:
        """Return the weight of one token; 0 outside the vocabulary."""
        if self.ids is None:
            return float(self.weights[token]) if 0 <= token < len(self.weights) else 0.0
        at = (self.ids == token).nonzero()[0]
        return float(self.weights[at[0]]) if len(at) else 0.0

    def draw(self, uniform: float) -> int:
        """Draw a token by a uniform in [0, 1); never one of weight 0."""
        return self._token(kernels.draw(self.weights, uniform * self.total()))

    def race(self, exponentials: FloatArray) -> int:
        """Return the winner of the exponential race; see ``engines.sampling.draws.race_winner``.

        Args:
            exponentials: [V] float32, at least as many as the greatest id.
        """
        if self.ids is None:
            return race_winner(self.weights, exponentials[: len(self.weights)])
        return self._token(race_winner(self.weights, exponentials[self.ids]))

    def _token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


class DraftProbs:
    """Draft probabilities of one slot between proposal and judgement, one distribution per draft position.

    Args:
        max_gamma: positions G.
        vocab_size: V of the target.

    Attributes:
        rows: [G, V] float32, weights over the whole vocabulary.
        totals: [G] float64, their sums.
    """

    def __init__(self, max_gamma: int, vocab_size: int) -> None:
        self.rows: FloatArray = np.zeros((max_gamma, vocab_size), dtype=np.float32)
        self.totals: WideArray = np.zeros(max_gamma)
        self._kept: list[TokenProbs | None] = [None] * max_gamma

    def keep(self, index: int, probs: TokenProbs | None) -> None:
        """Keep a distribution; None for the one that ``rows`` and ``totals`` hold."""
        self._kept[index] = probs

    def probs_at(self, index: int) -> TokenProbs:
        """Return the distribution that was kept last at a position."""
        kept = self._kept[index]
        if kept is not None:
            return kept
        assert self.totals[index] > 0.0, "probabilities were kept at each position of the draft"
        return TokenProbs(self.rows[index], None, float(self.totals[index]))


def point_mass(token: int | None) -> TokenProbs:
    """Put all mass on one token; None, a token outside the vocabulary, gives no mass at all."""
    ids = np.array([] if token is None else [token], dtype=np.int64)
    return TokenProbs(np.ones(len(ids)), ids)


def shared_weights(
    target: TokenProbs, draft: TokenProbs, scratch: FloatArray, *, weight: float = 1.0
) -> tuple[Row, float]:
    """Return min(p, q) on the target's support, in units of the target's weights, and its sum.

    The sum over the target's total is the overlap.

    Args:
        target: p.
        draft: q.
        scratch: [at least V] float32 to write in; what is returned may lie in it.
        weight: P in (0, 1]; below 1 it is min(p, q / P).
    """
    draft_total = draft.total()
    scale = target.total() / (draft_total * weight) if draft_total > 0.0 else 0.0
    if target.ids is None and draft.ids is None:
        shared = scratch[: len(target.weights)]
        mass = kernels.write_shared(target.dense, draft.dense, scale, shared)
        return shared, mass
    if target.ids is None:
        shared = scratch[: len(target.weights)]
        shared[:] = 0.0
        shared[draft.ids] = draft.weights * scale
        np.minimum(target.weights, shared, out=shared)
        return shared, kernels.total(shared)
    if draft.ids is None:
        proposed = _weights_of(draft.weights, target.ids)
        shared_wide = np.minimum(target.few, proposed * scale)
        return shared_wide, kernels.total(shared_wide)
    shared_few = np.empty_like(target.few)
    mass = kernels.write_shared_few(
        target.few, target.ids, draft.few, draft.ids, scale, scratch, shared_few
    )
    return shared_few, mass


def residual_probs(target: TokenProbs, shared: Row) -> tuple[TokenProbs, bool]:
    """Return the unnormalised (p - q)+, or p and True where the residual has no mass.

    Args:
        target: p.
        shared: min(p, q), as ``shared_weights`` gives; overwritten.
    """
    return _residual(target, shared, kernels.leave_residual(target.weights, shared, target.total()))


class JudgedToken(NamedTuple):
    """The outcome of the ratio test for one draft token.

    Attributes:
        is_kept: whether u * l * q(x) < p(x).
        overlap: sum of min(p, q), in [0, 1].
        left: of a rejected token, the distribution that the next one is drawn from: the residual norm((p - q)+).
        is_fallback: whether p stands in for a residual without mass.
    """

    is_kept: bool
    overlap: float
    left: TokenProbs
    is_fallback: bool


def judge_token(
    target: TokenProbs,
    draft: TokenProbs,
    token: int,
    coin: float,
    lenience: float,
    scratch: FloatArray,
) -> JudgedToken:
    """Keep or reject one draft token by the ratio test (``kernels.judge_token``).

    Args:
        target: p.
        draft: q, which the token was drawn from.
        token: x.
        coin: u in [0, 1).
        lenience: l in (0, 1]; 1 is exact.
        scratch: [at least V] float32 to write in; ``left`` may lie in it.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1 and appendix A.5.
    """
    shared, shared_mass = shared_weights(target, draft, scratch)
    target_total = target.total()
    is_kept, mass = kernels.judge_token(
        coin,
        lenience,
        target.weight(token),
        target_total,
        draft.weight(token),
        draft.total(),
        target.weights,
        shared,
    )
    overlap = shared_mass / target_total
    if is_kept:
        return JudgedToken(True, overlap, target, False)
    return JudgedToken(False, overlap, *_residual(target, shared, mass))


def _residual(target: TokenProbs, left: Row, mass: float) -> tuple[TokenProbs, bool]:
    if mass == 0.0:
        return target, True
    return TokenProbs(left, target.ids, mass), False


def _weights_of(weights: Row, ids: IntArray) -> Row:
    """[n] weights of some ids, 0 beyond the row."""
    known = ids < len(weights)
    return np.where(known, weights[np.where(known, ids, 0)], 0.0)
