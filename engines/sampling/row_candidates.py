"""Trees of candidates of the CPU sampler's rows: their logits, history and noise.

Laws are adjusted node by node, each with the history and the tokens of its own path, and only where the walk comes by.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling.adjust import adjusted_token_probs, logits_at
from outrider.engines.sampling.base import CandidateNode, SamplingRow, Verdict
from outrider.engines.sampling.candidates import (
    CandidateJudge,
    CandidateProbs,
    CandidateTree,
    draw_candidates,
)
from outrider.engines.sampling.noise import NoiseSource, Purpose
from outrider.engines.sampling.token_probs import TokenProbs, point_mass


class RowCandidates:
    """Draws and judges sampled trees, and keeps their draft laws in between.

    Args:
        noise: where random numbers come from.
        max_batch: slots, an upper bound of ``SamplingRow.slot``.
        vocab_size: V of the target.
    """

    def __init__(self, noise: NoiseSource, max_batch: int, vocab_size: int) -> None:
        self._noise = noise
        self._vocab_size = vocab_size
        self._laws = CandidateProbs(max_batch, vocab_size)
        self._judge: CandidateJudge | None = None
        self._row: FloatArray = np.zeros(0, dtype=np.float32)

    def draw(self, logits: FloatArray, point: CandidateNode) -> tuple[int, ...]:
        """The children of one node; logits [V] of the draft model behind it."""
        row, path = point.row, tuple(point.row.draft_tokens)
        probs = adjusted_token_probs(
            logits_at(logits, row, len(path)), row.params, self._laws.row(row.slot, path)
        )
        probs = point_mass(0) if probs is None else probs
        self._laws.keep(row.slot, path, probs)
        return draw_candidates(
            probs,
            point.count,
            lambda index: self._of_sibling(row, Purpose.OFFER, len(path), point.node, index),
            is_without_replacement=row.is_without_replacement,
            scratch=self._target_row(),
        )

    def judge(self, logits: FloatArray, row: SamplingRow, lenience: float) -> Verdict:
        """The kept path of a row's tree and the token after it; logits [N + 1, V], row n behind node n."""
        scratch = self._target_row()

        def target_at(node: int, path: tuple[int, ...]) -> TokenProbs | None:
            here = replace(row, draft_tokens=path)
            return adjusted_token_probs(
                logits_at(logits[node], here, len(path)), row.params, scratch
            )

        assert row.candidates is not None
        if self._judge is None:
            self._judge = CandidateJudge(self._vocab_size)
        start = len(row.history)
        return self._judge.judge(
            CandidateTree(
                tokens=row.draft_tokens,
                candidates=row.candidates,
                is_without_replacement=row.is_without_replacement,
                lenience=lenience,
                target_at=target_at,
                draft_at=lambda path: self._laws.probs_at(row.slot, path),
                coin=lambda depth, index: self._of_sibling(
                    row, Purpose.OFFER_COIN, depth, 0, index
                ),
                uniform=lambda purpose, depth: self._noise.uniform(
                    row.seed, purpose=purpose, position=start + depth, round_start=start
                ),
            )
        )

    def _target_row(self) -> FloatArray:
        """[V] float32, made when the first tree comes."""
        if not len(self._row):
            self._row = np.zeros(self._vocab_size, dtype=np.float32)
        return self._row

    def _of_sibling(
        self, row: SamplingRow, purpose: Purpose, depth: int, node: int, index: int
    ) -> float:
        start = len(row.history)
        return self._noise.of_sibling(
            row.seed,
            purpose=purpose,
            position=start + depth,
            round_start=start,
            node=node,
            index=index,
        )
