"""Chooses gammas step after step, and finds out whether it chose well.

Of all longest drafts the one of the highest rate wins; the one in use keeps its place until another
promises a margin more, so that equal choices never alternate. Two kinds of steps measure what the
choice cannot know: while drafts are made, a *probe* without any tells what they gain; while none
are made, an *exploration* of a few short drafts tells whether they would be kept by now. Both cost
a small, bounded share of the time. Measured step times correct the cost table as they come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from runtime.core.acceptance import Rates
from runtime.core.forecast import Batch, Forecast, Forecaster, Ints, Settings
from runtime.core.ledger import ControlReport, Ledger

LEAST_SCALE, MOST_SCALE = 0.1, 10.0
# Steps whose time holds what the draft model is fed to catch up, and so says nothing of the table.
UNSETTLED_STEPS = 3


class StepKind(StrEnum):
    """What a step is for.

    GAIN: drafts are expected to pay. NO_GAIN: they are not. PROBE: a step without drafts among
    steps with them. EXPLORE: a short draft among steps without.
    """

    GAIN = "gain"
    NO_GAIN = "no_gain"
    PROBE = "probe"
    EXPLORE = "explore"


@dataclass(slots=True, kw_only=True)
class _Decision:
    """What holds until the next decision.

    Attributes:
        gammas: [n] of the best choice.
        explored: [n] of an exploration; zeros where no row may draft.
        longest: greatest gamma of a row that is not fixed.
        explore_s: what an exploration costs beyond its gain.
    """

    batch: Batch
    forecast: Forecast
    gammas: Ints
    explored: Ints
    longest: int
    explore_s: float


class Controller:
    """The mutable state of the choice; its owner is the worker's thread.

    Args:
        forecaster: expectations under the cost table.
        max_gamma: G.
        settings: how it behaves.
    """

    def __init__(self, forecaster: Forecaster, *, max_gamma: int, settings: Settings) -> None:
        self._forecaster = forecaster
        self._settings = settings
        self._scales = np.ones(max_gamma + 1)
        self._ledger = Ledger(max_gamma=max_gamma)
        self._decision: _Decision | None = None
        self._longest: int | None = None
        self._since_probe = 0
        self._explore_left = 0
        self._credit_s = 0.0
        self._unsettled = 0

    @property
    def scales(self) -> Rates:
        """[G + 1] measured over tabled time of a step, by its longest draft."""
        return self._scales

    @property
    def is_due(self) -> bool:
        """Whether enough time was saved up for an exploration, which needs the present rows."""
        decision = self._decision
        return (
            decision is not None
            and decision.longest == 0
            and self._explore_left == 0
            and bool(decision.explored.any())
            and self._credit_s >= decision.explore_s
        )

    def decide(self, batch: Batch) -> None:
        """Choose for these rows until the next decision."""
        forecast = self._forecaster.forecast(batch, self._scales)
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
        explored, explore_s = self._plan_exploration(batch, forecast)
        self._decision = _Decision(
            batch=batch,
            forecast=forecast,
            gammas=gammas,
            explored=explored,
            longest=longest,
            explore_s=explore_s,
        )
        if (batch.uses_model & (batch.num_missing > 2 * self._forecaster.shared)).any():
            self._unsettled = UNSETTLED_STEPS
        self._ledger.consider(forecast.fixed_tokens, forecast.fixed_s)
        if self.is_due:
            self._credit_s = 0.0
            self._explore_left = self._settings.explore_steps

    def next_step(self) -> tuple[Ints, StepKind]:
        """[n] gammas of the next step, for the rows last decided on, and what the step is for."""
        decision = self._decision
        assert decision is not None, "decide comes first"
        if decision.longest > 0:
            self._explore_left = 0
            self._since_probe += 1
            if self._since_probe > self._settings.probe_every:
                self._since_probe = 0
                return np.where(decision.batch.is_fixed, decision.gammas, 0), StepKind.PROBE
            return decision.gammas, StepKind.GAIN
        if self._explore_left > 0 and decision.explored.any():
            self._explore_left -= 1
            return np.maximum(decision.gammas, decision.explored), StepKind.EXPLORE
        most_s = 2.0 * decision.explore_s
        spent_s = self._settings.explore_share * float(decision.forecast.table_s[0])
        self._credit_s = min(self._credit_s + spent_s * float(self._scales[0]), most_s)
        return decision.gammas, StepKind.NO_GAIN

    def observe(
        self,
        seconds: float,
        longest: int,
        num_emitted: int,
        kind: StepKind,
        *,
        num_rows: int | None = None,
    ) -> None:
        """Learn from the time of a step over the rows last decided on.

        Args:
            seconds: it took.
            longest: greatest draft that was verified.
            num_emitted: tokens it emitted.
            kind: what it was for.
            num_rows: that decoded, if others than those decided on.
        """
        decision = self._decision
        assert decision is not None, "decide comes first"
        plain_s = float(decision.forecast.table_s[0])
        table_s = float(decision.forecast.table_s[longest])
        if seconds <= 0.0:  # the clock is too coarse to tell
            seconds = table_s * float(self._scales[longest])
        self._unsettled = max(0, self._unsettled - 1)
        if longest == 0 or not self._unsettled:
            self._correct(seconds / table_s, longest)
        self._ledger.record(
            seconds=seconds,
            num_emitted=num_emitted,
            num_rows=num_rows or len(decision.gammas),
            plain_s=plain_s * float(self._scales[0]),
            has_drafts=longest > 0,
            is_probe=kind is StepKind.PROBE,
        )

    def report(self) -> ControlReport:
        """What the choices brought so far."""
        return self._ledger.report()

    def _correct(self, ratio: float, longest: int) -> None:
        """Move the scale of one longest draft, and half as much those of its kind."""
        step = self._settings.drift * np.log(np.clip(ratio / self._scales[longest], 0.5, 2.0))
        factor = np.exp(step)
        if longest > 0:
            self._scales[1:] *= np.sqrt(factor)
            self._scales[longest] *= np.sqrt(factor)
        else:
            self._scales[0] *= factor
        np.clip(self._scales, LEAST_SCALE, MOST_SCALE, out=self._scales)

    def _plan_exploration(self, batch: Batch, forecast: Forecast) -> tuple[Ints, float]:
        """One draft token for the row that misses least and those that share its feeding."""
        may = ~batch.is_fixed & (batch.caps > 0)
        explored = np.zeros(len(batch.caps), dtype=np.int64)
        if not may.any() or len(forecast.fixed_s) < 2:
            return explored, 0.0
        missing = np.where(batch.uses_model, batch.num_missing, 0)
        least = int(missing[may].min())
        explored[may & (missing <= max(least, self._forecaster.shared))] = 1
        once_s = self._forecaster.catch_up_s(least) * int(explored.sum())
        longer_s = float(forecast.fixed_s[1] - forecast.fixed_s[0])
        gained_s = float(
            (batch.survival[:, 0] * explored).sum() * forecast.fixed_s[0] / len(explored)
        )
        # However good the prospects: what is known to be bad is not tried for free.
        net_s = max(longer_s - gained_s, 0.2 * longer_s, 0.01 * float(forecast.fixed_s[0]))
        return explored, once_s + self._settings.explore_steps * net_s
