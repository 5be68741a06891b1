"""What the controller tries besides what it expects to be best, and what trying may cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from outrider.runtime.gamma import choice_loops, trial_loops
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.forecast import Batch, Forecast, Forecaster, Settings


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


class Finding(NamedTuple):
    """What is tried besides the best choice.

    Attributes:
        trial: another longest draft, whose time is so doubtful that it may be better; None for none.
        probe_every: steps with drafts between two probes.
    """

    trial: Trial | None
    probe_every: int


def plan_finding(
    forecast: Forecast, covariance: Rates, settings: Settings, best: int, behind_s: float = 0.0
) -> Finding:
    """What to try while drafts are made.

    Args:
        forecast: for the rows.
        covariance: [G + 2, G + 2] of step times, see ``StepTimes``.
        settings: of the controller.
        best: longest draft in use, at least 1.
        behind_s: seconds to feed the draft model what it missed in a probe.
    """
    other, cost_s, distance = trial_loops.plan(
        forecast.figures,
        covariance,
        best,
        forecast.floor,
        settings.margin,
        max(settings.probe_share, 1e-9),
        behind_s,
    )
    trial = None if other == best else Trial(forecast.gammas[other].tolist(), cost_s)
    return Finding(trial, int(min(distance, settings.probe_every)))


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
    facts = batch.facts
    num_steps, cost_s = trial_loops.explore(
        facts,
        batch.survival,
        forecast.figures,
        forecaster.feeding_s(facts[choice_loops.MISSING]),
        settings.explore_trials,
        settings.explore_steps,
        forecaster.chunk,
        forecaster.shared,
        gammas,
    )
    return Trial(gammas.tolist(), cost_s, num_steps) if num_steps else None
