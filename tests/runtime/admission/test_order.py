"""Whose turn it is, against a search through all who wait that follows the rules word by word."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from outrider.runtime.admission import order
from outrider.runtime.admission.order import LEVEL_S, Queue
from outrider.runtime.core.tenant import Claim, TenantRules

from tests.mutants import assert_caught


def claim(
    tenant: str = "", priority: int = 0, deadline_s: float = math.inf, most: int | None = None
) -> Claim:
    return Claim(
        tenant=tenant,
        priority=priority,
        deadline_s=deadline_s,
        rules=TenantRules(max_slots=most),
    )


def queue_of(*waiters: tuple[str, Claim], num_slots: int = 1, now: float = 0.0) -> Queue[str]:
    queue: Queue[str] = Queue()
    for name, wants in waiters:
        queue.add(name, wants, num_slots=num_slots, num_tokens=1, now=now)
    return queue


def names(queue: Queue[str], num_free: int, now: float = 0.0) -> list[str]:
    return [waiter.item for waiter in queue.take(num_free, now)]


def test_the_lower_priority_goes_first_then_the_earlier_deadline_then_who_came_first() -> None:
    queue = queue_of(
        ("late", claim()),
        ("later", claim()),
        ("due", claim(deadline_s=9.0)),
        ("urgent", claim(priority=-1)),
        ("patient", claim(priority=1, deadline_s=1.0)),
    )
    assert names(queue, 9) == ["urgent", "due", "late", "later", "patient"]


def test_waiting_is_worth_a_level_for_every_five_seconds() -> None:
    queue = queue_of(("patient", claim(priority=2)))
    queue.add("new", claim(deadline_s=99.0), num_slots=1, num_tokens=1, now=1.9 * LEVEL_S)
    assert names(queue, 1) == ["new"]
    queue.add("newer", claim(deadline_s=99.0), num_slots=1, num_tokens=1, now=3.0 * LEVEL_S)
    assert names(queue, 1, now=3.0 * LEVEL_S) == ["patient"]


def test_a_tenant_that_has_just_come_does_not_wait_behind_a_flood_that_has_waited_long() -> None:
    queue = queue_of(*((f"flood{i}", claim("flood")) for i in range(9)))
    assert names(queue, 2) == ["flood0", "flood1"]
    now = 20.0 * LEVEL_S
    queue.add("new", claim("other"), num_slots=1, num_tokens=1, now=now)
    assert names(queue, 1, now) == ["new"]


def test_waiting_long_counts_between_tenants_that_ask_for_other_priorities() -> None:
    queue = queue_of(("background", claim("a", priority=1)))
    now = 2.0 * LEVEL_S
    queue.add("new", claim("b"), num_slots=1, num_tokens=1, now=now)
    assert names(queue, 1, now) == ["background"], "of equal levels and tenants, it came first"
    # Held slots decide between equal levels.
    queue.add("background2", claim("a", priority=1), num_slots=1, num_tokens=1, now=0.0)
    assert names(queue, 1, now) == ["new"]


def test_tenants_that_hold_as_many_slots_take_turns() -> None:
    queue = queue_of(
        *((f"a{i}", claim("a")) for i in range(3)), *((f"b{i}", claim("b")) for i in range(3))
    )
    served = []
    for _ in range(6):
        (waiter,) = queue.take(1, 0.0)
        served.append(waiter.item)
        queue.release(waiter.claim.tenant, 1)
    assert served == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_tenant_at_its_limit_is_overtaken_until_it_gives_slots_back() -> None:
    queue = queue_of(
        *((f"a{i}", claim("a", priority=-5, most=2)) for i in range(4)), ("b", claim("b"))
    )
    assert names(queue, 9) == ["a0", "a1", "b"]
    assert queue.must_wait(claim("a", most=2), 1)
    assert not queue.must_wait(claim("b"), 1)
    queue.release("a", 1)
    assert names(queue, 9) == ["a2"]


def test_free_slots_are_kept_for_who_needs_several() -> None:
    queue: Queue[str] = Queue()
    queue.add("four", claim("a"), num_slots=4, num_tokens=1, now=0.0)
    assert names(queue, 2) == []
    queue.add("due", claim("a", deadline_s=1.0), num_slots=1, num_tokens=1, now=0.0)
    queue.add("other", claim("b"), num_slots=1, num_tokens=1, now=0.0)
    assert names(queue, 3) == [] and queue.must_wait(claim("c"), 1)
    queue.add("urgent", claim("b", priority=-1), num_slots=1, num_tokens=1, now=0.0)
    assert names(queue, 3) == ["urgent"], "a better priority overtakes"
    assert names(queue, 4) == ["four"]
    assert names(queue, 9) == ["other", "due"], "who holds less goes first"


def check_that_who_may_not_go_keeps_no_slots() -> None:
    queue = queue_of(("three", claim("b", most=3)), num_slots=3)
    assert names(queue, 2) == []
    queue.add("urgent", claim("b", priority=-1, most=3), num_slots=1, num_tokens=1, now=0.0)
    queue.add("other", claim("a"), num_slots=1, num_tokens=1, now=0.0)
    assert names(queue, 2) == ["urgent", "other"]
    queue.release("b", 1)
    assert names(queue, 3) == ["three"]


def test_who_may_not_go_keeps_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "is_overtaken or not may_go", "is_overtaken"
    assert_caught(monkeypatch, order, old, new, check_that_who_may_not_go_keeps_no_slots)


def test_who_leaves_keeps_nothing_and_what_is_left_keeps_its_place() -> None:
    queue = queue_of(("gone", claim(deadline_s=1.0)), ("group", claim()), num_slots=3)
    queue.add("last", claim(), num_slots=1, num_tokens=1, now=0.0)
    assert names(queue, 2) == []
    gone, group, _ = queue
    queue.remove(gone)
    queue.shrink(group, "half", 2)
    assert (len(queue), queue.num_tokens) == (2, 2)
    assert queue.ahead(claim(), 0.0) == (3.0, 2.0)
    assert names(queue, 2) == ["half"]
    assert names(queue, 1) == ["last"]
    queue.release("", 2)
    queue.release("", 1)
    assert not queue._lines, "a tenant that has nothing needs no memory"


@dataclass(eq=False)
class One:
    claim: Claim
    num_slots: int
    came_s: float
    number: int


class Oracle:
    """The rules O1 to O5, looking at everybody each time."""

    def __init__(self) -> None:
        self.waiting: list[One] = []
        self.held: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.num_turns = 0
        self.kept_for: One | None = None

    def level(self, one: One, now: float) -> int:
        return one.claim.priority - (math.floor(now / LEVEL_S) - math.floor(one.came_s / LEVEL_S))

    def rank(self, one: One, now: float) -> tuple[object, ...]:
        return (self.level(one, now), one.claim.deadline_s, one.number)

    def take(self, num_free: int, now: float) -> list[One]:
        taken = []
        while num_free and (first := self.first(now)) is not None:
            if first.num_slots > num_free:
                self.kept_for = first
                break
            if self.kept_for is first:
                self.kept_for = None
            self.waiting.remove(first)
            tenant = first.claim.tenant
            self.num_turns += 1
            self.turns[tenant] = self.num_turns
            self.held[tenant] = self.held.get(tenant, 0) + first.num_slots
            num_free -= first.num_slots
            taken.append(first)
        return taken

    def fits(self, one: One) -> bool:
        most = one.claim.rules.max_slots
        return most is None or self.held.get(one.claim.tenant, 0) + one.num_slots <= most

    def first(self, now: float) -> One | None:
        tenants = {one.claim.tenant for one in self.waiting}
        heads = {
            name: min(
                (o for o in self.waiting if o.claim.tenant == name), key=lambda o: self.rank(o, now)
            )
            for name in tenants
        }
        able = {name: head for name, head in heads.items() if self.fits(head)}
        if not able:
            return None
        floor = min(one.claim.priority for one in self.waiting if one.claim.tenant in able)
        best = min(
            able.values(),
            key=lambda o: (
                max(self.level(o, now), floor),
                self.held.get(o.claim.tenant, 0),
                self.turns.get(o.claim.tenant, 0),
                self.rank(o, now),
            ),
        )
        kept = self.kept_for
        if kept is None or not self.fits(kept):
            return best
        is_overtaken = max(self.level(best, now), floor) < max(self.level(kept, now), floor)
        return best if is_overtaken else kept


def check_against_the_oracle() -> None:
    rng = np.random.default_rng(3)
    queue: Queue[One] = Queue()
    oracle, running, now, num_slots = Oracle(), list[One](), 0.0, 6
    limits = {"a": None, "b": 3, "c": None}
    for number in range(1500):
        now += float(rng.exponential(0.6))
        if rng.random() < 0.5 and len(oracle.waiting) < 25:
            tenant = str(rng.choice([*limits, "b"]))
            deadline_s = now + float(rng.integers(1, 9)) if rng.random() < 0.4 else math.inf
            wants = claim(tenant, int(rng.integers(-2, 3)), deadline_s, limits[tenant])
            one = One(wants, int(rng.choice([1, 1, 1, 3])), now, number)
            oracle.waiting.append(one)
            queue.add(one, wants, num_slots=one.num_slots, num_tokens=2, now=now)
        if running and rng.random() < 0.4:
            one = running.pop(int(rng.integers(len(running))))
            queue.release(one.claim.tenant, one.num_slots)
            oracle.held[one.claim.tenant] -= one.num_slots
            idle = not any(o.claim.tenant == one.claim.tenant for o in (*running, *oracle.waiting))
            oracle.turns |= {one.claim.tenant: 0} if idle else {}
        if oracle.waiting and rng.random() < 0.05:
            gone = oracle.waiting[int(rng.integers(len(oracle.waiting)))]
            queue.remove(next(waiter for waiter in queue if waiter.item is gone))
            oracle.waiting.remove(gone)
            tenant = gone.claim.tenant
            idle = not any(o.claim.tenant == tenant for o in (*running, *oracle.waiting))
            oracle.turns |= {tenant: 0} if idle else {}
            if oracle.kept_for is gone:
                oracle.kept_for = None
        num_free = num_slots - sum(one.num_slots for one in running)
        expected = oracle.take(num_free, now)
        taken = queue.take(num_free, now)
        assert [waiter.item.number for waiter in taken] == [one.number for one in expected]
        running += expected
        assert len(queue) == len(oracle.waiting)
        assert queue.num_tokens == 2 * len(queue)


def test_turns_are_those_of_the_rules_word_by_word() -> None:
    check_against_the_oracle()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return claim.priority + _ticks(now)", "return claim.priority"),
        ("claim.deadline_s, number", "0.0, number"),
        ("max(one.waiting[0].key[0], floor)", "one.waiting[0].key[0]"),
        ("one.num_held,", "0,"),
        ("                one.turn,\n", ""),
        ("self.num_held + num_slots <= most", "num_slots <= most"),
        ("                self._reserving = first\n", ""),
        ("return best if is_overtaken or not may_go else reserving", "return reserving"),
    ],
)
def test_mutants_break_the_rules(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    errors = (AssertionError, KeyError)
    assert_caught(monkeypatch, order, old, new, check_against_the_oracle, errors)
