"""What the controller tries besides what it expects to be best, and what trying may cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.core import choice_loops
from runtime.core.acceptance import Rates
from runtime.core.forecast import Batch, Forecast, Forecaster, Settings

LEAST_WASTE = 0.05
"""Share of a trial's time that counts as wasted at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
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
    other = choice_loops.pick_other(forecast.figures, doubt, best, settings.margin)
    if other == best:
        return None
    wasted = max(1.0 - forecast.rate(other) / forecast.rate(best), LEAST_WASTE)
    return Trial(
        gammas=forecast.gammas[other].tolist(),
        cost_s=wasted * float(forecast.seconds[other]),
    )


def plan_exploration(
    batch: Batch, forecast: Forecast, settings: Settings, forecaster: Forecaster
) -> Trial | None:
    """Drafts while none are in use: one token each, for as many rows as tell most for their price.

    If any gamma pays, then so does this one. More rows cost more catching up, but share the steps, which
    then bring more tokens, too. Rows that miss least come first; those that may have ended before they
    told anything are left out.
    """
    missing = np.where(batch.uses_model, batch.num_missing, 0)
    lasts = batch.num_remaining > settings.explore_trials + missing // forecaster.chunk
    may = np.flatnonzero(~batch.is_fixed & (batch.caps > 0) & lasts)
    if not len(may) or forecast.fixed.shape[1] < 2:
        return None
    missing = missing[may]
    order = np.argsort(missing, kind="stable")
    may, missing = may[order], missing[order]
    count = np.arange(1, len(may) + 1)
    fed = np.cumsum(np.where(missing > forecaster.shared, missing - 1, 0))
    steps = np.maximum(-(-settings.explore_trials // count), settings.explore_steps)
    steps += np.maximum(-(-fed // forecaster.chunk), 1) - 1
    once_s = np.cumsum(forecaster.catch_up_each_s(missing))
    plain_s, longer_s = forecast.fixed[1, :2].tolist()
    longer_s -= plain_s
    gained_s = np.cumsum(batch.survival[may, 0]) * plain_s / len(batch.caps)
    # However good the prospects: what is known to be bad is not tried for free. However bad they are
    # said to be: what says so may be wrong, and must not keep it from being tried.
    least_s = max(LEAST_WASTE * longer_s, 0.01 * plain_s)
    cost_s = once_s + steps * np.minimum(np.maximum(longer_s - gained_s, least_s), plain_s)
    num_tried = int((cost_s / (count * steps)).argmin()) + 1
    gammas = np.where(batch.is_fixed, batch.caps, 0)
    gammas[may[:num_tried]] = 1
    return Trial(
        gammas=gammas.tolist(),
        cost_s=float(cost_s[num_tried - 1]),
        num_steps=int(steps[num_tried - 1]),
    )
