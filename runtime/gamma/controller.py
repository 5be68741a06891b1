"""Chooses gammas step after step, and finds out whether it chose well.

Of all longest drafts the one of the highest rate wins; the one in use keeps its place until another
promises a margin more, so that equal choices never alternate. Two kinds of steps measure what the
choice cannot know: while drafts are made, a *probe* of some without tells what they gain; while none
are made, an *exploration* of a few drafts tells whether they would be kept by now. Another longest
draft is explored, too, where it may well be better for all that is known of its time. Measured step
times correct the cost table as they come in (``core.step_times``). Drafts that are made have the benefit
of the doubt while few were judged: to find out later costs another catching up.

What drafts lose against plain decoding is bounded by construction: they are made out of credit only
(``core.account``), and the time that deciding takes is paid from it, too. A decision that nothing pays
is kept by situation: rows that come and go change nothing where the answer stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.chooser import Chooser
from outrider.runtime.gamma.decision import Decision, Settled, StepKind, Taken
from outrider.runtime.gamma.forecast import Batch, Forecaster, Settings
from outrider.runtime.gamma.guard import MOST_LOST
from outrider.runtime.gamma.observer import Observer
from outrider.runtime.gamma.probes import Probes
from outrider.runtime.gamma.report import ControlReport

__all__ = ["Controller", "StepKind"]


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
        share = settings.lost_share
        self._observer = Observer(max_gamma=max_gamma, spread=spread, lost_share=share)
        self._settled = Settled()
        self._decision: Decision | None = None
        self._chooser = Chooser(forecaster, self._observer, settings)
        self._probes = Probes(self._observer.knows_plain)
        self._trial_credit, self._explore_left, self._has_explored = 0.0, 0, False

    @property
    def scales(self) -> Rates:
        """[G + 1] measured over tabled time of a step of the rows last decided on."""
        self._observer.learn(self._decision)
        return self._observer.scales(self._num_rows)

    @property
    def is_due(self) -> bool:
        """Whether a decision on the present rows is due: to try drafts, after they were tried, or out of credit."""
        decision = self._decision
        if decision is None or self._explore_left:
            return False
        if decision.longest:
            return not decision.account.is_open
        return self._has_explored or self._is_trial_due

    @property
    def _is_trial_due(self) -> bool:
        """Whether there is credit to try drafts while none are in use."""
        decision = self._decision
        if decision is None or decision.longest or self._explore_left:
            return False
        return decision.trial is not None and decision.account.can_try(decision.trial.cost_s)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is drafted for rows last decided on, nor about to be tried."""
        decision = self._decision
        if decision is None or decision.longest or decision.floor:
            return False
        return not (self._explore_left or self.is_due)

    @property
    def rest_s(self) -> float:
        """Seconds of steps without drafts, at rest, until drafts are due to be tried; may be infinite."""
        decision = self._decision
        if decision is None or decision.trial is None:
            return math.inf
        return self._observer.accounts.wait_s(decision.account, decision.trial.cost_s)

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are in use for rows last decided on that have no gamma of their own."""
        return self._decision is not None and self._decision.longest > 0

    @property
    def _num_rows(self) -> int:
        return 1 if self._decision is None else len(self._decision.gammas)

    def recall(self, situation: Hashable) -> bool:
        """Whether nothing pays in such a situation, as far as is known; then this is decided."""
        if self._explore_left or self._has_explored:
            return False
        decision = self._settled.find(situation)
        if decision is None:
            return False
        if self._decision is not None and decision is not self._decision:
            self._observer.end(self._decision)
        decision.num_uses += 1
        self._decision = decision
        self._chooser.longest = 0
        return True

    def forget_settled(self) -> None:
        """Something was learnt of drafts: what never paid may pay."""
        self._settled.clear()

    def charge(self, seconds: float) -> None:
        """Have the rows last decided on pay for the time that deciding took."""
        decision = self._decision
        if decision is not None:
            # Beyond that much the machine was elsewhere.
            seconds = min(seconds, MOST_LOST * decision.plain_s)
            decision.account.settle(0.0, seconds, decision.most_s)

    def decide(
        self,
        batch: Batch,
        *,
        situation: Callable[[], Hashable] | None = None,
        may_try: bool = True,
    ) -> None:
        """Choose for these rows until the next decision.

        Args:
            batch: the rows.
            may_try: whether to begin trying drafts that are not expected to gain.
            situation: tells what rows that come and go may leave as it is; None to keep nothing.
        """
        self._settle()
        former, due = self._decision, None
        if former is not None and not (former.longest or self._has_explored) and self._is_trial_due:
            due = former.account
        self._has_explored = False
        decision = self._decision = self._chooser.choose(batch)
        if decision.trial is None:
            self._explore_left = 0
        elif may_try and self.is_due:
            self._explore_left = decision.trial.num_steps
        if decision.longest or self._explore_left:
            return
        if due is decision.account:
            decision.account.put_off()
        if situation is not None and decision.floor == 0:
            self._keep(situation(), decision)

    def _keep(self, situation: Hashable, decision: Decision) -> None:
        """Remember that nothing pays, unless it is only catching up that does not."""
        # Out of credit nothing is drafted, whoever has caught up: to find that out each time costs credit.
        if decision.account.is_open and self._chooser.is_lag_alone(decision.batch):
            return
        self._settled.keep(situation, decision)

    def next_step(self) -> tuple[list[int], StepKind]:
        """[n] gammas of the next step, for the rows last decided on, and what the step is for."""
        decision = self._decision
        assert decision is not None, "decide comes first"
        if decision.longest > 0:
            return self._step_with_drafts(decision)
        if self._explore_left > 0 and decision.trial is not None:
            self._explore_left -= 1
            self._has_explored = self._explore_left == 0
            return decision.trial.gammas, StepKind.EXPLORE
        return decision.gammas, StepKind.NO_GAIN

    def _step_with_drafts(self, decision: Decision) -> tuple[list[int], StepKind]:
        """Mostly what is best; a probe every so often, and a trial of another length where it may be."""
        self._explore_left = 0
        if self._probes.is_next(decision):
            return decision.bare, StepKind.PROBE
        self._trial_credit += decision.saved_s
        if decision.trial is not None and self._trial_credit >= decision.trial.cost_s:
            self._trial_credit = 0.0
            return decision.trial.gammas, StepKind.EXPLORE
        return decision.gammas, StepKind.GAIN

    @property
    def num_alike(self) -> int:
        """Steps to come that drafts of the best choice are made in, whether they are asked about or not."""
        decision = self._decision
        if decision is None or decision.longest == 0:
            return 0
        num_steps = self._probes.num_before(decision)
        if decision.trial is not None and decision.saved_s > 0.0:
            missing_s = decision.trial.cost_s - self._trial_credit
            num_steps = min(num_steps, math.ceil(missing_s / decision.saved_s) - 1)
        return max(0, num_steps)

    def skip(self, num_steps: int) -> None:
        """So many of them were taken without ``next_step``."""
        assert self._decision is not None, "decide comes first"
        self._probes.skip(num_steps)
        self._trial_credit += num_steps * self._decision.saved_s

    def observe(
        self,
        seconds: float,
        longest: int,
        num_emitted: int,
        kind: StepKind,
        *,
        num_rows: int | None = None,
        catches_up: bool = False,
        drafted: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        """Learn from one step; see ``Taken``, and ``num_rows`` None for the rows last decided on."""
        num_rows = num_rows or self._num_rows
        taken = Taken(seconds, longest, num_emitted, num_rows, kind, catches_up, drafted)
        self.observe_all((taken,))

    def observe_all(self, steps: Sequence[Taken]) -> None:
        """Learn from steps in a row over the rows last decided on."""
        assert self._decision is not None, "decide comes first"
        self._observer.steps(self._decision, steps)

    def observe_rest(self, seconds: Sequence[float], *, num_rows: int) -> None:
        """Learn from steps in a row that were all like the last: without drafts, and known to the engines.

        Args:
            seconds: each took.
            num_rows: that decoded in each.
        """
        decision = self._decision
        assert decision is not None and decision.longest == decision.floor == 0
        self._observer.rest(decision, seconds, num_rows)

    def report(self) -> ControlReport:
        """What the choices brought so far."""
        return self._observer.report(self._decision)

    def _settle(self) -> None:
        """Account for the decision that ends, and learn from its steps."""
        if self._decision is not None:
            self._observer.end(self._decision)
        self._observer.learn(self._decision)
