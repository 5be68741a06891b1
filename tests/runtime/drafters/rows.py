"""Rows as drafters see them, for tests that call a drafter directly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import DraftRow, Outcome


def row(
    history: Sequence[int],
    *,
    gamma: int = 8,
    key: str = "a",
    scope: str | None = None,
    num_prompt: int = 0,
    end_tokens: tuple[int, ...] = (),
    **params: object,
) -> DraftRow:
    return DraftRow(
        sampling=SamplingRow(
            index=0,
            slot=0,
            params=SamplingParams(temperature=0.0, end_token_ids=end_tokens),
            mode=ExactnessMode.MAX_ACCEPT,
            lenience=1.0,
            seed=0,
            history=np.array(history, dtype=np.int64),
            num_prompt=num_prompt,
        ),
        text=np.array(history, dtype=np.int64),
        gamma=gamma,
        num_computed=0,
        key=key,
        scope=scope,
        params=SpeculationParams(**params),
    )


def draft(drafter, history: Sequence[int], **options: object) -> tuple[int, ...]:
    (found,) = drafter.propose([row(history, **options)], [0])
    return found.tokens


def outcome(
    history: Sequence[int],
    draft_tokens: tuple[int, ...],
    num_accepted: int,
    choices: Sequence[Sequence[int]],
    *,
    num_fed: int,
    **options: object,
) -> Outcome:
    return Outcome(
        row=row(history, **options),
        num_fed=num_fed,
        draft_tokens=draft_tokens,
        num_accepted=num_accepted,
        choices=tuple(map(tuple, choices)),
    )
