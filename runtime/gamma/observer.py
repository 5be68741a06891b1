"""What steps taught: their times, what they cost the accounts, and what they brought.

Steps without drafts come in long rows of the same kind. They are counted at once and learnt from when
somebody is to decide, so that a step at rest costs the host next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.decision import Decision, StepKind, Taken
from outrider.runtime.gamma.guard import MOST_LOST, Accounts
from outrider.runtime.gamma.report import ControlReport, Ledger, Served
from outrider.runtime.gamma.step_times import StepTimes
from outrider.runtime.gamma.timed_steps import TimedSteps
from outrider.runtime.gamma.trial_loops import SETTLING

# Part of the rows that makes no difference to the time of a step.
FEW = 4
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
        account, plain_s, most_s = decision.account, decision.plain_s, decision.most_s
        scales, plain_tokens = self.scales(num_rows), decision.forecast.plain_tokens
        settle_drafts, settle_plain = self.accounts.settle_drafts, self.accounts.settle_plain
        step_table_s, is_drafting = decision.step_table_s, decision.longest > 0
        served: list[Served] = []
        ratios: dict[int, list[float]] = {}
        # Tabled times of steps whose shape is known: most are alike.
        known_s: dict[object, float] = {}
        slack = num_rows // FEW
        for step in steps:
            seconds, longest, num_emitted, step_rows, kind, catches_up, drafted = step
            # Others' prompts may still be read, or rows ended.
            has_time, fits = seconds > 0.0, -slack <= step_rows - num_rows <= slack
            if not has_time:
                seconds = step_table_s(step)
            if longest > floor or catches_up:
                self._num_in_row = 0
                tells = not catches_up
                invested_s = 0.0
                if catches_up and is_drafting:
                    expected_s = step_table_s(step) * float(scales[longest])
                    invested_s = max(0.0, seconds - expected_s)
                tokens = plain_tokens * step_rows / num_rows
                lost_s = seconds - invested_s - num_emitted / tokens * plain_s
                if not fits:
                    # Plain decoding of fewer rows takes less, nobody knows how much: nothing is held to be gained.
                    lost_s = max(lost_s, 0.0)
                if not catches_up:
                    lost_s = min(lost_s, MOST_LOST * plain_s)
                settle_drafts(account, seconds, lost_s, invested_s, most_s)
            else:
                # The first plain ones behind drafts take longer.
                self._num_in_row += 1
                tells = self._num_in_row > SETTLING
                settle_plain(account, seconds, most_s, is_probe=is_drafting)
            served.append((seconds, num_emitted, step_rows, longest > 0, kind is StepKind.PROBE))
            if not (tells and fits and has_time):
                continue
            table_s = known_s.get(drafted or longest)
            # The first step of a shape allocates and plans.
            if table_s is None and timed.is_known(decision.shape(step)):
                table_s = known_s[drafted or longest] = step_table_s(step)
            if table_s is not None:
                ratios.setdefault(longest, []).append(seconds / table_s)
        decision.num_steps += len(steps)
        self._ledger.record(served, plain_s)
        for longest, of_length in ratios.items():
            timed.add(num_rows, longest, of_length, is_plain=longest <= floor)
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
        self._ledger.record_rest(total_s, num_rows, num_steps)
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
