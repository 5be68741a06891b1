"""Greedy rows without processors: decided by where each raw row of logits is greatest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.base import FloatArray
from engines.laws import SamplingRow, Verdict


def judge_plain_greedy(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
    """One argmax over the columns of the longest draft instead of one per row and position.

    Args:
        logits: [B, R, V] float32.
        rows: plain greedy rows.
    """
    width = 1 + max((len(row.draft_tokens) for row in rows), default=0)
    greatest = logits[:, :width].argmax(axis=-1).tolist()
    verdicts = []
    for row in rows:
        best = greatest[row.index]
        num_accepted = 0
        for token in row.draft_tokens:
            if token != best[num_accepted]:
                break
            num_accepted += 1
        seen = enumerate(best[: num_accepted + 1])
        if all(math.isfinite(logits[row.index, column, token]) for column, token in seen):
            verdicts.append(Verdict(num_accepted=num_accepted, next_token=best[num_accepted]))
        else:
            verdicts.append(Verdict(num_accepted=0, next_token=None))
    return verdicts
