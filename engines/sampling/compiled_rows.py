"""Turns rows into the arguments of compiled loops (``engines.sampling.row_kernels``), and their answers into verdicts.

A row whose distribution covers the whole vocabulary takes one call; all plain greedy rows of a batch take one together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.buffers import TokenArrays, int64_view
from outrider.engines.sampling import row_kernels
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.kernels import WideArray
from outrider.engines.sampling.row_kernels import DRAFT, DRAFTED, KEPT, ROW, TOKEN
from outrider.engines.sampling.token_probs import DraftProbs

_SEED_MASK = (1 << 64) - 1


class Work(NamedTuple):
    """Memory that a judgement writes in.

    Attributes:
        weights: [V] float32.
        scratch: [V] float32.
        overlaps: [max_gamma] float64.
        drafts: draft tokens.
    """

    weights: FloatArray
    scratch: FloatArray
    overlaps: WideArray
    drafts: TokenArrays


def propose_compiled(logits: FloatArray, row: SamplingRow, kept: DraftProbs) -> int:
    """Draw a draft token and keep its probabilities.

    Args:
        logits: [n] float32 of the draft model, n at most V.
        row: neither greedy nor of shared noise; its params are dense.
        kept: of its slot.
    """
    params = row.params
    token: int = row_kernels.propose_token(
        logits,
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        row.seed & _SEED_MASK,
        len(row.history),
        len(row.draft_tokens),
        kept.rows,
        kept.totals,
    )
    return token


def judge_compiled(
    logits: FloatArray, row: SamplingRow, kept: DraftProbs, lenience: float, work: Work
) -> Verdict:
    """Keep sampled draft tokens by the ratio test, and draw the one after them.

    Args:
        logits: [R, V] float32 of the row.
        row: a sampled draft; its params are dense.
        kept: probabilities of the draft.
        lenience: (0, 1].
        work: overwritten.
    """
    params, gamma = row.params, len(row.draft_tokens)
    num_accepted, token, num_fallbacks = row_kernels.judge_draft(
        logits,
        work.drafts.of(row.draft_tokens),
        kept.rows,
        kept.totals,
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        lenience,
        row.seed & _SEED_MASK,
        len(row.history),
        work.weights,
        work.scratch,
        work.overlaps,
    )
    if token < 0:
        return Verdict(num_accepted=0, next_token=None)
    reached = work.overlaps[: min(num_accepted + 1, gamma)]
    return Verdict(
        num_accepted=num_accepted,
        next_token=token,
        overlaps=tuple(reached.tolist()),
        num_fallbacks=num_fallbacks,
    )


def match_compiled(logits: FloatArray, row: SamplingRow, work: Work) -> Verdict:
    """Draw the target's own token at each position, as long as the draft agrees; plain decoding without one.

    Args:
        logits: [R, V] float32 of the row.
        row: of no shared noise; its params are dense.
        work: overwritten.
    """
    params = row.params
    num_accepted, token = row_kernels.match_draft(
        logits,
        work.drafts.of(row.draft_tokens),
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        row.seed & _SEED_MASK,
        len(row.history),
        work.weights,
    )
    if token < 0:
        return Verdict(num_accepted=0, next_token=None)
    return Verdict(num_accepted=num_accepted, next_token=token)


class GreedyRows:
    """Greedy rows as the compiled loops take them, and their verdicts; all must be ``are_plain_greedy``."""

    def __init__(self, max_batch: int, max_gamma: int) -> None:
        self._width = DRAFT + max_gamma
        self._table = np.zeros((max_batch, self._width), dtype=np.int64)
        self._elements = int64_view(self._table)

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Return each row's greatest token below ``vocab_size``; 0 where its logits [B, R, V] are not finite."""
        cells, width, count = self._elements, self._width, len(rows)
        for at, row in enumerate(rows):
            cells[at * width + ROW] = row.index
        row_kernels.propose_greedy(logits, self._table, count, vocab_size)
        return [cells[at] for at in range(TOKEN, count * width, width)]

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Keep each row's draft tokens as long as they are the greatest of its logits [B, R, V]."""
        cells, width = self._elements, self._width
        for at, row in enumerate(rows):
            first = at * width
            cells[first + ROW] = row.index
            cells[first + DRAFTED] = len(row.draft_tokens)
            for place, token in enumerate(row.draft_tokens, start=first + DRAFT):
                cells[place] = token
        row_kernels.judge_greedy(logits, self._table, len(rows))
        verdicts = []
        for first in range(0, len(rows) * width, width):
            token = cells[first + TOKEN]
            verdicts.append(
                Verdict(num_accepted=cells[first + KEPT], next_token=token if token >= 0 else None)
            )
        return verdicts
