"""Greedy rows without processors: decided by where each raw row of logits is greatest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.base import FloatArray
from engines.laws import ExactnessMode, SamplingRow, Verdict


def are_plain_greedy(rows: Sequence[SamplingRow]) -> bool:
    """Whether the position of its greatest raw logit decides every row."""
    for row in rows:
        law = row.law
        if not law.is_greedy or law.has_processors:
            return False
        if row.mode is ExactnessMode.LENIENT and row.lenience != 1.0:
            return False
    return True


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
