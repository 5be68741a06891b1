"""What the controller tries besides what it expects to be best, and what trying may cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from runtime.core import trial_loops
from runtime.core.acceptance import Rates
from runtime.core.forecast import Batch, Forecast, Forecaster, Settings


class Trial(NamedTuple):
    """Something to try.

    Attributes:
        gammas: [n].
        cost_s: what it is expected to cost beyond its gain: one step of it while drafts are in use, a
            whole exploration while none are.
        num_steps: that it takes.
    """

    gammas: list[int]
    cost_s: float
    num_steps: int = 1


def plan_trial(forecast: Forecast, doubt: Rates, settings: Settings, best: int) -> Trial | None:
    """Another longest draft, whose time is so doubtful that it may be better than the best.

    Args:
        forecast: for the rows.
        doubt: [G + 1] standard deviation of the logarithm of each step's time over that of ``best``.
        settings: of the controller.
        best: longest draft in use, at least 1.
    """
    other, cost_s = trial_loops.pick_other(forecast.figures, doubt, best, settings.margin)
    return None if other == best else Trial(forecast.gammas[other].tolist(), cost_s)


def plan_exploration(
    batch: Batch, forecast: Forecast, settings: Settings, forecaster: Forecaster
) -> Trial | None:
    """Drafts while none are in use: one token each, for as many rows as tell most for their price.

    If any gamma pays, then so does this one. More rows cost more catching up, but share the steps, which
    then bring more tokens, too. Rows that miss least come first; those that may have ended before they
    told anything are left out. However good the prospects: what is known to be bad is not tried for free.
    However bad they are said to be: what says so may be wrong, and must not keep it from being tried.
    """
    gammas = np.empty(batch.num_live, dtype=np.int64)
    num_steps, cost_s = trial_loops.explore(
        batch.facts,
        batch.survival,
        forecast.figures,
        forecaster.catch_up,
        (settings.explore_trials, settings.explore_steps, forecaster.chunk, forecaster.shared),
        gammas,
    )
    return Trial(gammas.tolist(), cost_s, num_steps) if num_steps else None
