"""Makes decisions: what is best for some rows, whether there is credit for it, and what to try besides."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import numpy as np
from outrider.runtime.gamma.choice_loops import IS_FIXED, MISSING, USES_MODEL
from outrider.runtime.gamma.decision import Decision, best_longest
from outrider.runtime.gamma.forecast import Batch, Forecast, Forecaster, Settings, may_draft
from outrider.runtime.gamma.guard import REOPEN_STEPS
from outrider.runtime.gamma.observer import Observer
from outrider.runtime.gamma.trial_loops import SETTLING, TIMED
from outrider.runtime.gamma.trials import Trial, plan_exploration, plan_finding


class Chooser:
    """Decisions from forecasts; its owner is the worker's thread.

    Args:
        forecaster: expectations under the cost table.
        observer: of the steps so far.
        settings: of the controller.

    Attributes:
        longest: draft in use; None before the first decision.
    """

    def __init__(self, forecaster: Forecaster, observer: Observer, settings: Settings) -> None:
        self._forecaster, self._observer, self._settings = forecaster, observer, settings
        # To feed the draft model what one row misses after a probe.
        self._behind_s = float(forecaster.feeding_s(np.array([1 + SETTLING + TIMED]))[0])
        self.longest: int | None = None

    def choose(self, batch: Batch) -> Decision:
        """What is best, if there is credit for it, and what to try besides."""
        settings, observer, num_rows = self._settings, self._observer, batch.num_live
        scales = observer.scales(num_rows)
        forecast = self._forecaster.forecast(batch, scales)
        floor = forecast.floor
        is_drafting = self.longest is not None and self.longest > floor
        best = self._best(batch, forecast, batch.doubt if is_drafting else 0.0)
        plain_s = forecast.plain_table_s * float(scales[floor])
        account = observer.accounts.of(num_rows, plain_s)
        gammas = bare = forecast.gammas[0].tolist() if floor else [0] * num_rows
        longest = 0
        if best:
            gammas = forecast.gammas[best].tolist()
            longest = max(map(sub, gammas, bare)) if floor else max(gammas)
        trial, probe_every = None, 0
        if longest or may_draft(batch):
            self.longest = best
        if longest and not account.is_open:
            needed_s = REOPEN_STEPS * plain_s + self._catch_up_s(batch, gammas)
            account.is_open = account.credit_s >= needed_s
            if not account.is_open:
                trial = Trial(bare, needed_s)
                gammas, longest, self.longest = bare, 0, floor
        elif not longest:
            trial = plan_exploration(batch, forecast, settings, self._forecaster)
        if longest:
            behind_s = self._behind_s * (num_rows - gammas.count(0))
            covariance = observer.learnt.covariance(num_rows)
            trial, probe_every = plan_finding(forecast, covariance, settings, best, behind_s)
        return Decision(
            batch=batch,
            forecast=forecast,
            plain_s=plain_s,
            floor=floor,
            gammas=gammas,
            bare=bare,
            account=account,
            trial=trial,
            longest=longest,
            saved_s=settings.trial_share * plain_s,
            probe_every=probe_every,
        )

    def _catch_up_s(self, batch: Batch, gammas: Sequence[int]) -> float:
        """Seconds to feed the draft model all that rows which are to draft miss."""
        facts = batch.facts
        fed = (np.array(gammas) > 0) & (facts[USES_MODEL] > 0) & (facts[IS_FIXED] == 0)
        return float(self._forecaster.feeding_s(facts[MISSING][fed]).sum())

    def _best(self, batch: Batch, forecast: Forecast, doubt: float = 0.0) -> int:
        is_refilled = batch.is_refilled
        return best_longest(
            forecast, self.longest, self._settings, doubt=doubt, is_refilled=is_refilled
        )

    def is_lag_alone(self, batch: Batch) -> bool:
        """Whether drafts would pay if rows had caught up; False where none has to."""
        if not (batch.facts[MISSING] > self._forecaster.shared).any():
            return False
        facts = batch.facts.copy()
        facts[MISSING] = 1
        caught_up = batch._replace(facts=facts)
        scales = self._observer.scales(batch.num_live)
        return self._best(caught_up, self._forecaster.forecast(caught_up, scales)) > 0
