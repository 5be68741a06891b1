"""Chooses gammas step after step, and finds out whether it chose well.

Of all longest drafts the one of the highest rate wins; the one in use keeps its place until another
promises a margin more, so that equal choices never alternate. Two kinds of steps measure what the
choice cannot know: while drafts are made, a *probe* without any tells what they gain; while none
are made, an *exploration* of a few drafts tells whether they would be kept by now. Another longest
draft than the one in use is explored, too, where it may well be better for all that is known of its
time. All cost a small, bounded share of the time. Measured step times correct the cost table as they
come in (``core.step_times``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from runtime.core.acceptance import Rates
from runtime.core.forecast import Batch, Forecast, Forecaster, Settings
from runtime.core.ledger import ControlReport, Ledger
from runtime.core.step_times import StepTimes
from runtime.core.trials import Trial, plan_exploration, plan_trial

# Timed steps that wait to be learnt from at most.
MAX_TIMED = 32
# Steps from which even a probe every so often is worth its price, doubled up to the usual distance.
FIRST_PROBE = 4


class StepKind(StrEnum):
    """What a step is for.

    GAIN: drafts are expected to pay. NO_GAIN: they are not. PROBE: a step without drafts among
    steps with them. EXPLORE: another longest draft than the one that is expected to be best.
    """

    GAIN = "gain"
    NO_GAIN = "no_gain"
    PROBE = "probe"
    EXPLORE = "explore"


@dataclass(slots=True, kw_only=True)
class _Decision:
    """What holds until the next decision.

    Attributes:
        table_s: [G + 1] tabled time of a step by its longest draft.
        plain_s: expected time of a step without drafts.
        gammas: [n] of the best choice.
        bare: [n] of a step without drafts, but for rows of a fixed gamma.
        trial: something else to try; None for nothing.
        longest: greatest gamma of a row that is not fixed.
        saved_s: time that each other step earns for the trial.
        num_steps: steps taken under it.
    """

    batch: Batch
    forecast: Forecast
    table_s: list[float]
    plain_s: float
    gammas: list[int]
    bare: list[int]
    trial: Trial | None
    longest: int
    saved_s: float
    num_steps: int = 0


class Controller:
    """The mutable state of the choice; its owner is the worker's thread.

    Args:
        forecaster: expectations under the cost table.
        max_gamma: G.
        settings: how it behaves.
        spread: disagreement of the cost table's measurements, as a share.
    """

    def __init__(
        self, forecaster: Forecaster, *, max_gamma: int, settings: Settings, spread: float = 0.0
    ) -> None:
        self._forecaster = forecaster
        self._settings = settings
        self._times = StepTimes(max_gamma=max_gamma, spread=spread)
        self._timed: dict[int, list[float]] = {}
        self._num_timed = 0
        self._shapes: set[tuple[int, int]] = set()
        self._ledger = Ledger(max_gamma=max_gamma)
        self._decision: _Decision | None = None
        self._longest: int | None = None
        self._since_probe = 0
        self._probe_every = min(FIRST_PROBE, settings.probe_every)
        self._trial_credit = 0.0
        self._explore_left = 0
        self._credit_s = 0.0

    @property
    def scales(self) -> Rates:
        """[G + 1] measured over tabled time of a step of the rows last decided on."""
        return self._times.scales(self._num_rows)

    @property
    def is_due(self) -> bool:
        """Whether enough time was saved up for an exploration, which needs the present rows."""
        decision = self._decision
        return (
            decision is not None
            and decision.longest == 0
            and self._explore_left == 0
            and decision.trial is not None
            and self._credit_s >= decision.trial.cost_s
        )

    @property
    def _num_rows(self) -> int:
        return 1 if self._decision is None else len(self._decision.gammas)

    def decide(self, batch: Batch) -> None:
        """Choose for these rows until the next decision."""
        self._settle()
        num_rows = len(batch.caps)
        scales = self._times.scales(num_rows)
        forecast = self._forecaster.forecast(batch, scales)
        rates = forecast.rates
        best = int(rates.argmax())
        kept = self._longest
        if kept is not None and kept != best and rates[kept] > 0.0:
            # No more than the caps allow is in use where the longest draft is not allowed.
            best = best if rates[best] > rates[kept] * (1.0 + self._settings.margin) else kept
        gammas = forecast.gammas[best]
        longest = int((gammas * ~batch.is_fixed).max())
        if (batch.caps[~batch.is_fixed] > 0).any():
            self._longest = best
        trial = (
            plan_trial(batch, forecast, self._times, self._settings, best)
            if longest
            else plan_exploration(batch, forecast, self._times, self._settings, self._forecaster)
        )
        self._decision = _Decision(
            batch=batch,
            forecast=forecast,
            table_s=forecast.table_s.tolist(),
            plain_s=float(forecast.table_s[0] * scales[0]),
            gammas=gammas.tolist(),
            bare=np.where(batch.is_fixed, gammas, 0).tolist(),
            trial=trial,
            longest=longest,
            saved_s=trial.share * float(forecast.table_s[0] * scales[0]) if trial else 0.0,
        )
        if self.is_due:
            self._credit_s = 0.0
            self._explore_left = self._settings.explore_steps

    def next_step(self) -> tuple[list[int], StepKind]:
        """[n] gammas of the next step, for the rows last decided on, and what the step is for."""
        decision = self._decision
        assert decision is not None, "decide comes first"
        if decision.longest > 0:
            return self._step_with_drafts(decision)
        trial = decision.trial
        if trial is not None:
            if self._explore_left > 0:
                self._explore_left -= 1
                return trial.gammas, StepKind.EXPLORE
            self._credit_s = min(self._credit_s + decision.saved_s, 2.0 * trial.cost_s)
        return decision.gammas, StepKind.NO_GAIN

    def _step_with_drafts(self, decision: _Decision) -> tuple[list[int], StepKind]:
        """Mostly what is best; a probe every so often, and a trial of another length where it may be."""
        self._explore_left = 0
        self._since_probe += 1
        if self._since_probe > self._probe_every:
            self._since_probe = 0
            self._probe_every = min(2 * self._probe_every, self._settings.probe_every)
            return decision.bare, StepKind.PROBE
        self._trial_credit += decision.saved_s
        if decision.trial is not None and self._trial_credit >= decision.trial.cost_s:
            self._trial_credit = 0.0
            return decision.trial.gammas, StepKind.EXPLORE
        return decision.gammas, StepKind.GAIN

    def observe(
        self,
        seconds: float,
        longest: int,
        num_emitted: int,
        kind: StepKind,
        *,
        num_rows: int | None = None,
        catches_up: bool = False,
    ) -> None:
        """Learn from the time of a step over the rows last decided on.

        Args:
            seconds: it took.
            longest: greatest draft that was verified.
            num_emitted: tokens it emitted.
            kind: what it was for.
            num_rows: that decoded, if others than those decided on.
            catches_up: whether its time holds what a draft model was fed that it had missed, and so
                says nothing of the table.
        """
        decision = self._decision
        assert decision is not None, "decide comes first"
        decision.num_steps += 1
        if seconds <= 0.0:  # the clock is too coarse to tell
            seconds = decision.table_s[longest]
        elif not catches_up and self._is_known_shape(longest):
            self._timed.setdefault(longest, []).append(seconds / decision.table_s[longest])
            self._num_timed += 1
            if self._num_timed >= MAX_TIMED:
                self._learn()
        self._ledger.record(
            seconds=seconds,
            num_emitted=num_emitted,
            num_rows=num_rows or len(decision.gammas),
            plain_s=decision.plain_s,
            has_drafts=longest > 0,
            is_probe=kind is StepKind.PROBE,
        )

    def _is_known_shape(self, longest: int) -> bool:
        """Whether engines have run such a step before: the first of a shape allocates and plans."""
        assert self._decision is not None
        shape = (self._decision.batch.num_live, longest)
        is_known = shape in self._shapes
        self._shapes.add(shape)
        return is_known

    def report(self) -> ControlReport:
        """What the choices brought so far."""
        decision = self._decision
        return self._ledger.report(None if decision is None else self._hindsight(decision))

    def _settle(self) -> None:
        """Account for the decision that ends, and learn from its steps."""
        decision = self._decision
        if decision is not None and decision.num_steps:
            self._ledger.consider(*self._hindsight(decision))
        if self._num_timed:
            self._learn()

    @staticmethod
    def _hindsight(decision: _Decision) -> tuple[Rates, Rates]:
        """[G + 1] tokens and seconds that fixed gammas would have brought in its steps."""
        forecast, num_steps = decision.forecast, decision.num_steps
        return forecast.fixed_tokens * num_steps, forecast.fixed_s * num_steps

    def _learn(self) -> None:
        """Take in the times of the steps since; those of the kind seen most tell the level first."""
        for longest, ratios in sorted(self._timed.items(), key=lambda one: -len(one[1])):
            self._times.learn(self._num_rows, longest, ratios)
        self._timed.clear()
        self._num_timed = 0
        if self._decision is not None:
            self._decision.plain_s = self._decision.table_s[0] * float(self.scales[0])
