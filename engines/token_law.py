"""The law of one token: unnormalised weights, over the whole vocabulary or over the few ids that a truncation kept.

Rows stay unnormalised because most are asked for one token's probability or one draw, and stay where they were written
because a row of a large vocabulary is 600 KB. Every operation is a function of the one row, with sums in an order that
its length alone decides: a row has the same bits alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engines.base import FloatArray, IntArray
from engines.draws import draw_token, race_winner

Weights = npt.NDArray[np.float32] | npt.NDArray[np.float64]

# Below this the float32 difference of two rows is rounding, not mass.
SMALLEST_RESIDUAL = 1e-6


@dataclass(slots=True)
class TokenLaw:
    """Weights proportional to the probabilities.

    Attributes:
        weights: dense [V or padded] float32, zeros beyond V; or [n] float64, one per id.
        ids: [n] int64, distinct, in any order; None for dense.
    """

    weights: Weights
    ids: IntArray | None = None
    _total: float | None = field(default=None, compare=False)

    def total(self) -> float:
        """Sum of the weights, which must not change after the first call."""
        if self._total is None:
            self._total = float(np.add.reduce(self.weights))
        return self._total

    def weight(self, token: int) -> float:
        """Weight of one token; 0 outside the vocabulary."""
        if self.ids is None:
            return float(self.weights[token]) if 0 <= token < len(self.weights) else 0.0
        at = (self.ids == token).nonzero()[0]
        return float(self.weights[at[0]]) if len(at) else 0.0

    def draw(self, uniform: float) -> int:
        """Token drawn by a uniform in [0, 1); never one of weight 0."""
        return self._token(draw_token(self.weights, uniform))

    def race(self, exponentials: FloatArray) -> int:
        """Winner of the exponential race; see ``engines.draws.race_winner``.

        Args:
            exponentials: [V] float32, at least as many as the greatest id.
        """
        if self.ids is None:
            return race_winner(self.weights[: len(exponentials)], exponentials)
        return self._token(race_winner(self.weights, exponentials[self.ids]))

    def probs(self, vocab_size: int) -> FloatArray:
        """[V] float32, sums to 1 up to rounding: the law written out, a copy."""
        row = np.zeros(vocab_size, dtype=np.float32)
        if self.ids is None:
            row[:] = self.weights[:vocab_size] / self.total()
        else:
            row[self.ids] = self.weights / self.total()
        return row

    def _token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


def shared_weights(
    target: TokenLaw, draft: TokenLaw, scratch: FloatArray, *, weight: float = 1.0
) -> Weights:
    """min(p, q) on the target's support, in units of the target's weights; their sum over its total is the overlap.

    Args:
        target: p.
        draft: q.
        scratch: [padded] float32 to write in, longer than both; what is returned may lie in it.
        weight: P in (0, 1]; below 1 it is min(p, q / P).
    """
    draft_total = draft.total()
    scale = target.total() / (draft_total * weight) if draft_total > 0.0 else 0.0
    if target.ids is None:
        shared = scratch[: len(target.weights)]
        if draft.ids is None:
            np.multiply(draft.weights, scale, out=shared)
        else:
            shared[:] = 0.0
            shared[draft.ids] = draft.weights * scale
        return np.minimum(target.weights, shared, out=shared)
    if draft.ids is None:
        return np.minimum(target.weights, draft.weights[target.ids] * scale)
    scratch[target.ids] = 0.0
    scratch[draft.ids] = draft.weights * scale
    return np.minimum(target.weights, scratch[target.ids])


def residual_law(target: TokenLaw, shared: Weights) -> tuple[TokenLaw, bool]:
    """Unnormalised (p - q)+, or p itself, and whether p had to stand in for a residual without mass.

    Args:
        target: p.
        shared: min(p, q), as ``shared_weights`` gives; overwritten.
    """
    residual = np.subtract(target.weights, shared, out=shared)
    if float(np.add.reduce(residual)) <= SMALLEST_RESIDUAL * target.total():
        return target, True
    return TokenLaw(residual, target.ids), False
