"""What the controller tries besides what it expects to be best, and what trying may cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.core.forecast import Batch, Forecast, Forecaster, Settings
from runtime.core.step_times import StepTimes

LEAST_WASTE = 0.05
"""Share of a trial's time that counts as wasted at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Something to try.

    Attributes:
        gammas: [n].
        cost_s: what it costs beyond its gain: one step of it while drafts are in use, a whole
            exploration while none are.
        share: of the time, that may be spent so.
    """

    gammas: list[int]
    cost_s: float
    share: float


def plan_trial(
    batch: Batch, forecast: Forecast, times: StepTimes, settings: Settings, best: int
) -> Trial | None:
    """Another longest draft, whose time is so doubtful that it may be better than the best.

    Args:
        batch: the rows.
        forecast: for them.
        times: what is known of steps.
        settings: of the controller.
        best: longest draft in use, at least 1.
    """
    rates = forecast.rates
    hopes = rates * np.exp(times.doubt(len(batch.caps), best))
    hopes[[0, best]] = 0.0
    other = int(hopes.argmax())
    if not hopes[other] > rates[best] * (1.0 + settings.margin):
        return None
    wasted = max(1.0 - float(rates[other] / rates[best]), LEAST_WASTE)
    return Trial(
        gammas=forecast.gammas[other].tolist(),
        cost_s=wasted * float(forecast.seconds[other]),
        share=settings.hopeful_share,
    )


def plan_exploration(
    batch: Batch,
    forecast: Forecast,
    times: StepTimes,
    settings: Settings,
    forecaster: Forecaster,
) -> Trial | None:
    """Drafts while none are in use.

    One draft token, for the row that misses least and those that share its feeding: if any gamma
    pays, then so does this one. More of the time is spent on it while it may well pay.
    """
    may = ~batch.is_fixed & (batch.caps > 0)
    if not may.any() or len(forecast.fixed_s) < 2:
        return None
    doubt = float(times.doubt(len(batch.caps), 0)[1])
    is_hopeful = forecast.rates[1] * np.exp(doubt) > forecast.rates[0]
    missing = np.where(batch.uses_model, batch.num_missing, 0)
    least = int(missing[may].min())
    tried = may & (missing <= max(least, forecaster.shared))
    once_s = forecaster.catch_up_s(least) * int(tried.sum())
    plain_s = float(forecast.fixed_s[0])
    longer_s = float(forecast.fixed_s[1]) - plain_s
    gained_s = float((batch.survival[:, 0] * tried).sum() * plain_s / len(tried))
    # However good the prospects: what is known to be bad is not tried for free. However bad they are
    # said to be: what says so may be wrong, and must not keep it from being tried.
    net_s = max(longer_s - gained_s, 0.2 * longer_s, 0.01 * plain_s)
    return Trial(
        gammas=np.where(batch.is_fixed, batch.caps, tried).tolist(),
        cost_s=once_s + settings.explore_steps * min(net_s, plain_s),
        share=settings.hopeful_share if is_hopeful else settings.explore_share,
    )
