"""Where the laws of sampled draft tokens are kept between proposal and judgement, per slot."""

from __future__ import annotations

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling.kernels import WideArray
from outrider.engines.sampling.token_probs import TokenProbs


class DraftProbs:
    """The laws of one slot's draft, one per draft position.

    Args:
        max_gamma: positions G.
        vocab_size: V of the target.

    Attributes:
        rows: [G, V] float32, weights of the laws over the whole vocabulary.
        totals: [G] float64, their sums.
    """

    def __init__(self, max_gamma: int, vocab_size: int) -> None:
        self.rows: FloatArray = np.zeros((max_gamma, vocab_size), dtype=np.float32)
        self.totals: WideArray = np.zeros(max_gamma)
        self._laws: list[TokenProbs | None] = [None] * max_gamma

    def keep(self, index: int, probs: TokenProbs | None) -> None:
        """Keep a law; None for the one that ``rows`` and ``totals`` hold."""
        self._laws[index] = probs

    def probs_at(self, index: int) -> TokenProbs:
        """The law that was kept last at a position."""
        kept = self._laws[index]
        if kept is not None:
            return kept
        assert self.totals[index] > 0.0, "a law was kept at each position of the draft"
        return TokenProbs(self.rows[index], None, float(self.totals[index]))
