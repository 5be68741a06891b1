"""What a worker makes of claims: order of slots, shares of tenants, and deadlines that cannot be met."""

from __future__ import annotations

import pytest
from outrider.runtime.admission import order
from outrider.runtime.core.errors import (
    Cancelled,
    DeadlineUnreachable,
    Overloaded,
    QuotaExceeded,
    RequestError,
)
from outrider.runtime.core.tenant import Claim, TenantRules
from outrider.runtime.loop import inbox, worker

from tests.mutants import assert_caught
from tests.runtime.markov import Clock, Harness


class Ticking(Harness):
    """A harness whose clock goes on by a second with each step."""

    def __init__(self, **settings: object) -> None:
        super().__init__(clock=Clock(), has_draft=False, **{"queue_timeout_s": 1e9, **settings})

    def tick(self) -> None:
        """Run a step that takes a second."""
        extend = self.target.extend

        def slow(spans):
            self.clock.now += 1.0
            return extend(spans)

        self.target.extend = slow
        try:
            before_s = self.clock.now
            self.worker.run_step()
            self.clock.now = before_s + 1.0
        finally:
            del self.target.extend
        self.check_invariants()

    def warm_up(self, num_steps: int = 8) -> None:
        """Have it measure what whole chunks take: a second for four tokens."""
        self.submit("warm", (1,) * 4 * num_steps, max_tokens=1)
        while not self.events["warm"] or not self.worker.run_step():
            self.tick()
            if not self.live:
                break


def test_slots_go_to_the_lowest_priority_then_the_nearest_deadline() -> None:
    harness = Ticking(max_batch=1)
    harness.submit("runs", max_tokens=3)
    harness.tick()
    for name, options in {
        "last": {"priority": 1},
        "first": {},
        "due": {"deadline_s": 1000.0},
        "urgent": {"priority": -1},
    }.items():
        harness.submit(name, max_tokens=1, **options)
    ended: list[str] = []
    while len(ended) < 4:
        harness.tick()
        ended += [
            one
            for one in ("last", "first", "due", "urgent")
            if harness.events[one] and one not in ended
        ]
    assert ended == ["urgent", "due", "first", "last"]
    harness.check_is_idle()


def test_a_tenant_holds_no_more_slots_than_it_may_and_others_overtake_it() -> None:
    harness, rules = Ticking(max_batch=4), TenantRules(max_slots=2)
    for number in range(4):
        harness.submit(f"a{number}", max_tokens=4, tenant="a", rules=rules)
    harness.submit("b", max_tokens=4, tenant="b")
    harness.tick()
    assert [one.spec.request_id for one in harness.live] == ["a0", "a1", "b"]
    assert harness.worker.snapshot().num_queued == 2
    harness.run()
    assert all(harness.finished(f"a{number}").num_output == 4 for number in range(4))
    harness.check_is_idle()


def test_completions_of_one_prompt_count_their_slots() -> None:
    harness, rules = Ticking(max_batch=4), TenantRules(max_slots=3)
    harness.submit("runs", max_tokens=9, tenant="a", rules=rules)
    harness.submit_group("three", (1, 2), 3, max_tokens=2, tenant="a", rules=rules)
    harness.tick()
    assert [one.spec.request_id for one in harness.live] == ["runs"]
    with pytest.raises(RequestError) as refusal:
        harness.submit_group("four", (1, 2), 4, tenant="a", rules=rules)
    assert (refusal.value.field, refusal.value.rule) == (
        "n",
        "must be at most 3, the slots that the tenant may hold",
    )
    harness.run()
    assert harness.finished("three.2").num_output == 2
    harness.check_is_idle()


def test_slots_of_requests_that_end_otherwise_are_given_back_too() -> None:
    harness, rules = Ticking(max_batch=4), TenantRules(max_slots=1)
    for name in ("running", "queued", "granted"):
        harness.submit(name, tenant="a", rules=rules)
    harness.tick()
    for name in ("running", "queued"):
        harness.worker.cancel(f"internal-{name}", Cancelled("client"))
    harness.tick()
    harness.tick()
    assert [one.spec.request_id for one in harness.live] == ["granted"]
    harness.run()
    assert not harness.worker._inbox._queue._lines
    harness.check_is_idle()


def test_too_many_waiting_requests_of_a_tenant_are_refused_and_no_other_tenant_s() -> None:
    harness, rules = Ticking(max_batch=1), TenantRules(max_queued=2)
    harness.submit("runs")
    for number in range(2):
        harness.submit(f"a{number}", tenant="a", rules=rules)
    with pytest.raises(QuotaExceeded) as refusal:
        harness.submit("a2", tenant="a", rules=rules)
    assert refusal.value.quota == "max_queued"
    with pytest.raises(QuotaExceeded):
        harness.worker.check_room(1, 1, 0, Claim(tenant="a", rules=rules))
    harness.worker.check_room(1, 1)
    harness.submit("b", tenant="b", rules=rules)
    harness.run()
    harness.submit("a2", tenant="a", rules=rules)
    harness.run()
    assert harness.finished("a2").num_output == 12


def test_a_full_queue_is_full_for_every_priority_of_a_tenant() -> None:
    harness = Ticking(max_batch=1, max_queued=1)
    harness.submit("runs")
    harness.submit("waits")
    with pytest.raises(Overloaded):
        harness.submit("urgent", priority=-100)


def check_that_a_flood_makes_room_in_a_full_queue() -> None:
    harness = Ticking(max_batch=1, max_queued=3, max_queued_tokens=12)
    for number in range(4):
        harness.submit(f"a{number}", (1,) * 3, max_tokens=2, tenant="a", priority=3 - number)
    harness.worker.check_room(1, 3, 0, Claim(tenant="b"))
    with pytest.raises(Overloaded):
        harness.worker.check_room(1, 10, 0, Claim(tenant="b"))
    with pytest.raises(Overloaded):
        harness.submit("worse", tenant="b", priority=3)
    harness.submit("b0", (1,) * 3, max_tokens=2, tenant="b")
    assert harness.worker.snapshot().num_queued == 1 + 3
    # Two of a, one of b: another one would be as many.
    with pytest.raises(Overloaded):
        harness.submit("b1", tenant="b")
    with pytest.raises(Overloaded):
        harness.submit("a4", tenant="a", priority=-9)
    harness.run()
    assert harness.error("a1").reason == "QUEUE_FULL", "it was the last in turn"
    for name in ("a0", "a2", "a3", "b0"):
        assert harness.finished(name).num_output == 2
    harness.check_is_idle()


def test_a_flood_makes_room_in_a_full_queue() -> None:
    check_that_a_flood_makes_room_in_a_full_queue()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (order, "self.num_waiting(claim.tenant) + 1", "self.num_waiting(claim.tenant)"),
        (order, "last if last.claim.priority >= claim.priority else None", "last"),
        (order, "longest.waiting[-1]", "longest.waiting[0]"),
        (inbox, "num_waiting - 1, num_tokens - crowder.num_tokens", "num_waiting - 1, 0"),
        (inbox, "                self._queue.remove(crowder)\n", ""),
        (inbox, "self.cancel(request.spec.internal_id, error)", "pass"),
    ],
)
def test_mutants_make_room_wrongly(
    monkeypatch: pytest.MonkeyPatch, module: object, old: str, new: str
) -> None:
    killer = check_that_a_flood_makes_room_in_a_full_queue
    errors = (AssertionError, pytest.fail.Exception, IndexError, Overloaded)
    assert_caught(monkeypatch, module, old, new, killer, errors)


def check_that_hopeless_requests_are_refused_at_once() -> None:
    harness = Ticking(max_batch=2)
    with pytest.raises(DeadlineUnreachable):
        harness.submit("passed", deadline_s=harness.clock.now)
    harness.submit("unmeasured", (1,) * 90, max_tokens=1, deadline_s=3.0)
    harness.worker.cancel("internal-unmeasured", Cancelled("client"))
    harness.tick()
    harness.warm_up()
    now = harness.clock.now
    with pytest.raises(DeadlineUnreachable):
        harness.submit("long", (1,) * 40, max_tokens=1, deadline_s=now + 9.5)
    harness.submit("fits", (1,) * 40, max_tokens=1, deadline_s=now + 12.0)
    harness.tick()
    # What is ahead of it has 36 tokens left, nine seconds.
    with pytest.raises(DeadlineUnreachable):
        harness.submit("behind", (1,) * 4, max_tokens=1, deadline_s=now + 10.5)
    with pytest.raises(DeadlineUnreachable):
        harness.worker.check_room(1, 4, 0, Claim(deadline_s=now + 10.5))
    harness.submit("patient", (1,) * 4, max_tokens=1, deadline_s=now + 20.0)
    for _ in range(40):
        harness.tick()
    assert harness.finished("fits").num_output == harness.finished("patient").num_output == 1
    harness.check_is_idle()


def check_that_waiting_for_slots_counts() -> None:
    """One slot, which is given back every three seconds."""
    harness = Ticking(max_batch=1)
    for number in range(20):
        harness.submit(f"a{number}", (1,), max_tokens=3)
    for _ in range(20):
        harness.tick()
    now, num_waiting = harness.clock.now, harness.worker.snapshot().num_queued
    assert num_waiting > 10
    with pytest.raises(DeadlineUnreachable):
        harness.submit("late", (1,), deadline_s=now + 2.0 * num_waiting, priority=1)
    harness.submit("in time", (1,), deadline_s=now + 5.0 * num_waiting, priority=1)
    harness.submit("urgent", (1,), max_tokens=1, deadline_s=now + 6.0, priority=-99)
    for _ in range(5 * num_waiting):
        harness.tick()
    assert harness.finished("in time").num_output and harness.finished("urgent").num_output
    harness.check_is_idle()


def check_that_slots_come_too_late() -> None:
    """Behind a long prompt that began after it was queued, a request gets no slot that it cannot use in time."""
    harness = Ticking(max_batch=2)
    harness.warm_up()
    now = harness.clock.now
    harness.submit("a", (1,), max_tokens=9)
    harness.submit("b", (1,), max_tokens=9)
    harness.tick()
    harness.submit("late", (1,) * 8, max_tokens=1, priority=1, deadline_s=now + 14.5)
    harness.submit("long", (1,) * 80, max_tokens=1, priority=-1)
    while not harness.events["late"]:
        harness.tick()
    assert (
        isinstance(harness.error("late"), DeadlineUnreachable)
        and harness.error("late").reason == "HOPELESS"
    )
    assert harness.clock.now < now + 14.0, "its deadline has not passed"
    harness.run()
    assert harness.finished("long").num_output == 1
    harness.check_is_idle()


CHECKS = {
    "refused": check_that_hopeless_requests_are_refused_at_once,
    "slots": check_that_waiting_for_slots_counts,
    "rechecked": check_that_slots_come_too_late,
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_cannot_be_answered_in_time_is_refused(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize(
    ("module", "old", "new", "name"),
    [
        (inbox, "raise DeadlineUnreachable\n", "pass\n", "refused"),
        (inbox, "now + needed_s >= claim", "now + needed_s > claim", "refused"),
        (inbox, "num_ahead=ahead[1] + sum(map(num_unfed, has_slot)),", "num_ahead=ahead[1],", "refused"),
        (inbox, "num_missing=ahead[0] + num_slots - self._num_left,", "num_missing=0.0,", "slots"),
        (inbox, "hopeless += waiter.item", "admit(waiter.item)", "rechecked"),
        (worker, "        self._finisher.end_with_errors(endings)", "        pass", "rechecked"),
    ],
)  # fmt: skip
def test_mutants_let_hopeless_requests_in(
    monkeypatch: pytest.MonkeyPatch, module: object, old: str, new: str, name: str
) -> None:
    errors = (AssertionError, pytest.fail.Exception, IndexError)
    assert_caught(monkeypatch, module, old, new, CHECKS[name], errors)
