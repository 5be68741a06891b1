"""Rows to sample, as tests want them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow

PROMPT = np.array([0], dtype=np.int64)


def masks_at(mask_of, prefixes):
    """[n, words] int32 of a function from the tokens behind the history to words; None without one."""
    return None if mask_of is None else np.stack([mask_of(prefix) for prefix in prefixes])


def row_for(draft=(), **changes):
    row = SamplingRow(
        index=0,
        slot=0,
        params=SamplingParams(),
        mode=ExactnessMode.MAX_ACCEPT,
        lenience=1.0,
        seed=11,
        history=PROMPT,
        num_prompt=1,
        draft_tokens=tuple(draft),
    )
    return replace(row, **changes)
