"""What steps taught: their times, what they cost the accounts, and what they brought.

Steps without drafts come in long rows of the same kind. They are counted at once and learnt from when
somebody is to decide, so that a step at rest costs the host next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.acceptance import Rates
from runtime.core.account import Accounts
from runtime.core.decision import Decision, StepKind, Taken, pay
from runtime.core.ledger import ControlReport, Ledger
from runtime.core.step_times import StepTimes
from runtime.core.timed_steps import TimedSteps
from runtime.core.trial_loops import SETTLING

MOST_PENDING = 512
"""Steps of one decision that wait to be held against what fixed gammas would have brought."""


class Observer:
    """The mutable state of what was measured; its owner is the worker's thread.

    Args:
        max_gamma: G.
        spread: disagreement of the cost table's measurements, as a share.
        lost_share: of the time served, that may be lost.

    Attributes:
        accounts: credit by load.
    """

    def __init__(self, *, max_gamma: int, spread: float, lost_share: float) -> None:
        self.accounts = Accounts(share=lost_share)
        self._timed = TimedSteps(max_gamma=max_gamma, spread=spread)
        self._ledger = Ledger(max_gamma=max_gamma)
        # Plain steps since the last one with drafts.
        self._num_in_row = 0

    @property
    def learnt(self) -> StepTimes:
        """Times as of the last ``learn``."""
        return self._timed.learnt

    def scales(self, num_rows: int) -> Rates:
        """[G + 1] measured over tabled time of a step over so many rows."""
        return self._timed.learnt.scales(num_rows)

    def knows_plain(self, num_rows: int) -> bool:
        """Whether the time of a plain step over about so many rows was ever taken."""
        return self._timed.has_plain(num_rows)

    def steps(self, decision: Decision, steps: Sequence[Taken]) -> None:
        """Learn from steps in a row.

        They are held against what was known before them: times of steps with drafts alone would pass for those of
        a slow machine, on which plain steps would be slow as well, and drafts that lose would be held to gain.
        """
        timed, num_rows, floor = self._timed, len(decision.gammas), decision.floor
        scales, most_s = self.scales(num_rows), decision.most_s
        accounts, account, record = self.accounts, decision.account, self._ledger.record
        is_drafting, plain_s = decision.longest > 0, decision.plain_s
        for step in steps:
            seconds, longest, num_emitted, step_rows, kind, catches_up, _ = step
            has_time, is_of = seconds > 0.0, decision.is_of(step_rows)
            if not has_time:
                seconds = decision.step_table_s(step)
            if longest > floor or catches_up:
                self._num_in_row = 0
                tells = not catches_up
                expected_s = seconds
                if catches_up:
                    expected_s = decision.step_table_s(step) * float(scales[longest])
                pay(accounts, decision, step, seconds, expected_s, is_of=is_of, most_s=most_s)
            else:
                # The first plain ones behind drafts take longer.
                self._num_in_row += 1
                tells = self._num_in_row > SETTLING
                accounts.settle_plain(account, seconds, most_s, is_probe=is_drafting)
            record(seconds, num_emitted, step_rows, plain_s, longest > 0, kind is StepKind.PROBE)
            # The first step of a shape allocates and plans.
            if tells and is_of and has_time and timed.is_known(decision.shape(step)):
                ratio = seconds / decision.step_table_s(step)
                timed.add(num_rows, longest, (ratio,), is_plain=longest <= floor)
        decision.num_steps += len(steps)
        if timed.is_full:
            self.learn(decision)

    def rest(self, decision: Decision, seconds: Sequence[float], num_rows: int) -> None:
        """Learn from steps in a row without drafts, over so many rows; each took so long."""
        total_s, num_steps = sum(seconds), len(seconds)
        decision.num_steps += num_steps
        table_s = float(decision.forecast.table_s[0])
        told = seconds[max(0, SETTLING - self._num_in_row) :]
        self._num_in_row += num_steps
        ratios = [one / table_s for one in told if one > 0.0]
        self._timed.add(num_rows, 0, ratios, is_plain=True)
        self.accounts.settle_plain(decision.account, total_s, decision.most_s)
        num_emitted = num_rows * num_steps
        self._ledger.record(
            total_s, num_emitted, num_emitted, total_s, False, False, num_steps=num_steps
        )
        if decision.num_steps >= MOST_PENDING:
            self.learn(decision)
            self.end(decision)

    def end(self, decision: Decision) -> None:
        """Hold the steps taken under a decision against what fixed gammas would have brought."""
        if decision.num_steps:
            self._ledger.consider(decision.forecast, decision.num_steps)
            decision.num_steps = 0

    def learn(self, decision: Decision | None) -> None:
        """Take in the times of the steps since, which move what a plain step is held to take."""
        if self._timed.learn() and decision is not None:
            floor = decision.floor
            scale = float(self.scales(len(decision.gammas))[floor])
            decision.plain_s = decision.forecast.plain_table_s * scale

    def report(self, decision: Decision | None) -> ControlReport:
        """What choices brought so far, steps of the decision that holds included."""
        if decision is None:
            return self._ledger.report()
        return self._ledger.report(decision.forecast, decision.num_steps)
