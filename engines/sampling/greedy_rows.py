"""Plain greedy rows of a batch, proposed and judged in one compiled call.

A call per row takes ten microseconds and more where a model's pass has pushed its code out of the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.buffers import int64_view
from outrider.engines.sampling import kernels
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.kernels import DRAFT, DRAFTED, KEPT, ROW, TOKEN


class GreedyRows:
    """Greedy rows as the compiled loops take them, and their verdicts; all must be ``are_plain_greedy``.

    Args:
        max_batch: rows at most.
        max_gamma: draft tokens of a row at most.
    """

    def __init__(self, max_batch: int, max_gamma: int) -> None:
        self._width = DRAFT + max_gamma
        self._table = np.zeros((max_batch, self._width), dtype=np.int64)
        self._elements = int64_view(self._table)

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """The greatest token of column 0 of each row's logits [B, R, V], below ``vocab_size``; 0 where not finite."""
        cells, width, count = self._elements, self._width, len(rows)
        for at, row in enumerate(rows):
            cells[at * width + ROW] = row.index
        kernels.propose_greedy(logits, self._table, count, vocab_size)
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
        kernels.judge_greedy(logits, self._table, len(rows))
        verdicts = []
        for first in range(0, len(rows) * width, width):
            token = cells[first + TOKEN]
            verdicts.append(
                Verdict(num_accepted=cells[first + KEPT], next_token=token if token >= 0 else None)
            )
        return verdicts
