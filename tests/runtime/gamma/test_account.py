"""What drafts lose against plain decoding is bounded by construction, whatever is expected of them."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.decision import Taken
from outrider.runtime.gamma.guard import (
    FIRST_STEPS,
    MOST_LOST,
    MOST_STEPS,
    PAYBACK_STEPS,
    Account,
    Accounts,
)

from tests.runtime.gamma.test_controller import batch, controller, table

SHARE = 0.005


class Served:
    """Steps of a controller whose forecasts never learn what is true.

    Attributes:
        lost_s: against plain decoding at one second per step.
        total_s: time served.
    """

    def __init__(self, one: Controller, *, draft_s: float, tokens: float) -> None:
        self.one, self.draft_s, self.tokens = one, draft_s, tokens
        self.lost_s = self.total_s = 0.0
        self.kinds: list[StepKind] = []

    def run(self, rows, steps: int) -> None:
        for step in range(steps):
            if step % 10 == 0 or self.one.is_due:
                self.one.decide(rows)
            gammas, kind = self.one.next_step()
            longest = max(gammas)
            took_s = self.draft_s if longest else 1.0
            tokens = self.tokens if longest else 1.0
            self.one.observe(took_s, longest, tokens * len(gammas), kind)
            self.lost_s += took_s - tokens
            self.total_s += took_s
            self.kinds.append(kind)


@pytest.mark.parametrize(("draft_s", "tokens"), [(1.4, 1.0), (1.2, 1.1), (1.0, 0.5), (4.0, 2.0)])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_what_wrong_expectations_lose_is_bounded(
    draft_s: float, tokens: float, num_rows: int
) -> None:
    """Nine drafts of ten are expected to be kept, for ever; they are not, and the clock says so."""
    served = Served(controller(table(c=0.05)), draft_s=draft_s, tokens=tokens)
    served.run(batch(*[0.9] * num_rows), 4000)
    overdrawn = max(MOST_LOST, draft_s - tokens)
    assert 0.0 < served.lost_s <= FIRST_STEPS + SHARE * served.total_s + overdrawn
    drafted = [kind is StepKind.GAIN for kind in served.kinds]
    # They are given another chance out of what was saved since.
    assert any(drafted[-2000:])
    assert sum(drafted[-2000:]) < 400


def test_drafts_that_gain_are_never_stopped() -> None:
    served = Served(controller(table(c=0.05)), draft_s=1.4, tokens=3.0)
    served.run(batch(0.9), 1000)
    assert served.kinds.count(StepKind.NO_GAIN) == 0
    assert served.kinds.count(StepKind.GAIN) > 900


def test_a_gain_of_the_past_pays_for_a_bounded_loss() -> None:
    one = controller(table(c=0.05))
    Served(one, draft_s=1.4, tokens=5.0).run(batch(0.9), 1000)
    later = Served(one, draft_s=1.5, tokens=1.0)
    later.run(batch(0.9), 2000)
    # Until the next probe, steps with drafts that take 1.5 for 1.4 pass for those of a slower machine.
    assert later.lost_s <= 1.1 * (MOST_STEPS + SHARE * later.total_s + MOST_LOST)


def test_one_load_does_not_pay_for_another() -> None:
    one = controller(table(c=0.05))
    Served(one, draft_s=1.4, tokens=5.0).run(batch(0.9), 500)
    busy = Served(one, draft_s=1.5, tokens=1.0)
    busy.run(batch(*[0.9] * 8), 500)
    assert busy.lost_s <= FIRST_STEPS + SHARE * busy.total_s + MOST_LOST
    alone = Served(one, draft_s=1.4, tokens=5.0)
    alone.run(batch(0.9), 100)
    assert alone.kinds.count(StepKind.GAIN) > 90


def test_trying_costs_its_share_of_the_time_even_where_it_costs_more_than_expected() -> None:
    """Drafts are known not to pay; what they cost is twice what the table says."""
    served = Served(controller(table(c=0.4)), draft_s=1.8, tokens=1.1)
    served.run(batch(0.1), 6000)
    tried = served.kinds.count(StepKind.EXPLORE)
    assert tried >= 30
    assert served.lost_s <= SHARE * served.total_s + 8.0


def test_a_draft_model_that_caught_up_is_paid_for_by_the_steps_after_it() -> None:
    """Catching up takes twenty steps, which is more than there is credit; then half a token is gained."""
    one = controller(table(c=0.05))
    one.decide(batch(0.9, num_missing=np.array([100])))
    one.observe(20.0, 0, 1, StepKind.GAIN, catches_up=True)
    served = Served(one, draft_s=1.4, tokens=2.2)
    served.run(batch(0.9), 200)
    assert served.kinds.count(StepKind.NO_GAIN) == 0


def test_what_was_invested_is_lost_where_drafts_end() -> None:
    accounts = Accounts(share=0.0)
    account = accounts.of(3, 1.0)
    accounts.settle_drafts(account, 33.0, 0.0, PAYBACK_STEPS, 100.0)
    assert account.credit_s == pytest.approx(FIRST_STEPS - 1.0)
    accounts.settle_plain(account, 1.0, 100.0, is_probe=True)
    assert account.credit_s == pytest.approx(FIRST_STEPS - 1.0)
    accounts.settle_plain(account, 1.0, 100.0)
    assert account.credit_s == pytest.approx(FIRST_STEPS - PAYBACK_STEPS)
    assert not account.is_open
    accounts.settle_plain(account, 1.0, 100.0)
    assert account.credit_s == pytest.approx(FIRST_STEPS - PAYBACK_STEPS)


def test_who_invested_bears_the_loss_where_rows_that_ended_leave_the_others_to_another_account() -> (
    None
):
    accounts = Accounts(share=0.0)
    many, few = accounts.of(8, 1.0), accounts.of(4, 1.0)
    accounts.settle_drafts(many, 33.0, 0.0, PAYBACK_STEPS, 100.0)
    accounts.settle_plain(few, 1.0, 100.0)
    assert few.credit_s == FIRST_STEPS
    assert few.is_open
    assert many.credit_s == pytest.approx(FIRST_STEPS - PAYBACK_STEPS)
    assert not many.is_open


def test_credit_is_earned_kept_up_to_a_limit_and_shared_by_alike_loads() -> None:
    accounts = Accounts(share=0.01)
    account = accounts.of(5, 2.0)
    assert account.credit_s == FIRST_STEPS * 2.0
    assert accounts.of(8, 7.0) is account
    assert accounts.of(9, 7.0) is not account
    accounts.settle_plain(account, 100.0, 1000.0)
    assert account.credit_s == pytest.approx(FIRST_STEPS * 2.0 + 1.0)
    accounts.settle_plain(account, 100.0, 3.0)
    assert account.credit_s == 3.0


def test_an_account_closes_when_it_is_overdrawn_and_stays_closed() -> None:
    account = Account(1.0)
    account.settle(0.0, 1.0, 10.0)
    assert account.is_open
    account.settle(0.0, 0.1, 10.0)
    assert not account.is_open
    account.settle(5.0, 0.0, 10.0)
    assert not account.is_open


def test_the_time_of_deciding_is_paid_for() -> None:
    one = controller(table(c=0.4))
    one.decide(batch(0.1))
    for _ in range(1000):
        one.charge(1.0)
    for _ in range(1000):
        assert not one.is_due
        gammas, kind = one.next_step()
        assert (gammas, kind) == ([0], StepKind.NO_GAIN)
        one.observe(1.0, 0, 1, kind)


def test_a_decision_that_was_held_up_costs_two_plain_steps_at_most() -> None:
    """Its time is somebody else's, and must not keep drafts away for long."""
    one = controller(table(c=0.05))
    one.decide(batch(0.9))
    credit_s = one._decision.account.credit_s
    one.charge(1e6)
    assert one._decision.account.credit_s == credit_s - 2.0


def served(one: Controller, slowness: float, *, steps: int) -> bool:
    """Whether drafts are in use after steps with them that were told at once, on a slower machine."""
    one.decide(batch(0.9))
    longest = max(one.next_step()[0])
    emitted = round(1.0 + sum(0.9**position for position in range(1, longest + 1)))
    seconds = slowness * (1.0 + 0.05 * longest)
    # The first step of a shape says nothing of times.
    one.observe_all([Taken(seconds, longest, emitted, 1, StepKind.GAIN)] * steps)
    one.decide(batch(0.9))
    return one.is_drafting


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_machine_slower_than_its_table_is_no_loss_by_drafts(slowness: float) -> None:
    one = controller(table(c=0.05))
    assert served(one, slowness, steps=16)
    assert one._decision.account.is_open
    # What is known by now does not excuse drafts that emit nothing but what plain steps would.
    longest = max(one.next_step()[0])
    for _ in range(30):
        one.observe_all([Taken(2.0 * slowness, longest, 1, 1, StepKind.GAIN)] * 4)
        one.observe_all([Taken(slowness, 0, 1, 1, StepKind.PROBE)] * 2)
    assert not one._decision.account.is_open


def test_more_rows_are_tried_at_once_where_that_tells_more_for_its_price() -> None:
    rows = batch(*[0.3] * 8)
    one = controller(table(c=0.4))
    assert tried(one, rows) == [1] * 8
    # Catching up costs eight steps per row: one is tried, the one that misses least.
    missing = np.full(8, 81)
    missing[3] = 21
    lagging = batch(*[0.3] * 8, num_missing=missing)
    assert tried(controller(table(c=0.4, catch_up_s=0.1)), lagging) == [
        int(row == 3) for row in range(8)
    ]


def test_rows_that_are_about_to_end_are_not_tried() -> None:
    left = np.array([100, 2, 100, 1])
    found = tried(controller(table(c=0.4)), batch(*[0.3] * 4, num_remaining=left))
    assert found == [1, 0, 1, 0]
    ending = batch(0.3, 0.3, num_remaining=np.array([1, 1]))
    one = controller(table(c=0.4))
    one.decide(ending)
    assert not one.is_due


def tried(one: Controller, rows) -> list[int]:
    """Gammas of the first exploration."""
    for _ in range(3000):
        one.decide(rows)
        gammas, kind = one.next_step()
        if kind is StepKind.EXPLORE:
            return gammas
        one.observe(1.0, 0, len(gammas), kind)
    raise AssertionError("nothing was tried")


def test_what_never_paid_is_not_decided_anew_until_something_was_learnt() -> None:
    one = controller(table(c=0.9))
    one.charge(0.0)
    one.decide(batch(0.1), situation=lambda: 1, may_try=False)
    one.decide(batch(0.1, 0.1), situation=lambda: 2, may_try=False)
    assert one.recall(1)
    gammas, kind = one.next_step()
    assert (gammas, kind) == ([0], StepKind.NO_GAIN)
    assert one.recall(2)
    assert one.next_step()[0] == [0, 0]
    assert not one.recall(3)
    one.forget_settled()
    assert not one.recall(1)


def test_a_decision_is_thought_over_after_it_stood_in_for_many() -> None:
    one = controller(table(c=0.9))
    one.decide(batch(0.1), situation=lambda: "one", may_try=False)
    uses = 0
    while one.recall("one"):
        uses += 1
        assert uses <= 1000
    assert uses >= 10


def test_what_only_catching_up_forbids_is_not_kept() -> None:
    costs = table(c=0.02, catch_up_s=0.1)
    one = controller(costs)
    few = {"num_missing": np.array([100]), "num_remaining": np.array([2])}
    one.decide(batch(0.8, **few), situation=lambda: "one")
    assert one.next_step()[0] == [0]
    assert not one.recall("one")


def test_out_of_credit_a_decision_is_due_at_once() -> None:
    one = controller(table(c=0.05))
    one.decide(batch(0.9))
    longest = max(one.next_step()[0])
    assert not one.is_due
    for _ in range(10):
        one.observe(3.0, longest, 1, StepKind.GAIN)
    assert one.is_due
    one.decide(batch(0.9))
    assert not one.is_due
    assert one.next_step()[0] == [0]


def test_a_step_over_fewer_rows_than_were_decided_on_brings_no_credit() -> None:
    """Three of four prompts are still being read: a step of one row is quick, whatever is drafted."""
    one = controller(table(c=0.05))
    one.decide(batch(0.9, 0.9, 0.9, 0.9))
    longest = max(one.next_step()[0])
    credit_s = one._decision.account.credit_s
    one.observe(0.1, longest, 2, StepKind.GAIN, num_rows=1)
    assert one._decision.account.credit_s == pytest.approx(credit_s, abs=0.01)
    one.observe(0.1, longest, 8, StepKind.GAIN)
    assert one._decision.account.credit_s > credit_s + 1.0
