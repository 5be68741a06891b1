"""Requests whose gamma is chosen step by step: the same answers, and drafts only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from outrider.engines.base import FloatArray
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.params import Progressed
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.gamma.decision import Taken
from outrider.runtime.gamma.steering import RETRY_S
from outrider.runtime.gamma.steering_rows import are_others

from tests.runtime.core.test_request import request
from tests.runtime.gamma.test_controller import table
from tests.runtime.loop.test_step import answers, plain
from tests.runtime.markov import Harness, counting_logits, limits

LENGTH = 60


def wrong_logits(prefix: tuple[int, ...]) -> FloatArray:
    return counting_logits((prefix[-1] + 5,))


def right_until(length: int):
    """A draft that is right until the context has this many tokens, and wrong from there on."""
    return lambda prefix: (counting_logits if len(prefix) < length else wrong_logits)(prefix)


def costly(c: float = 0.3) -> CostTable:
    return table(c=c, slope=0.05, token_s=1e-3, catch_up_s=0.01)


def harness(costs: CostTable, draft=counting_logits, **options: object) -> Harness:
    return Harness("F3", draft=ScriptedEngine(draft, limits(10)), costs=costs, **options)


def lengths(one: Harness, name: str) -> list[int]:
    """Draft tokens of every pass of a request that verified."""
    return [
        len(event.trace.draft_tokens)
        for event in one.events[name]
        if isinstance(event, Progressed) and not event.trace.is_prompt
    ]


@pytest.mark.parametrize("pair", ["F3", "F4"])
@pytest.mark.parametrize("drafter", ["lookup", "model", "lookup+model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choosing_gamma_never_changes_a_token(pair: str, drafter: str, temperature: float) -> None:
    """T28 and T29 with gamma chosen, for drafts that are free, cheap and dear, and random arrivals."""
    options = {"temperature": temperature, "mode": ExactnessMode.SEED_STABLE}
    expected = plain(pair, **options)
    for c in (1e-6, 0.1, 0.6):
        for batch in range(1, 6):
            found = answers(
                pair,
                batch,
                arrivals=batch,
                drafter=drafter,
                costs=table(c=c, slope=c, catch_up_s=c / 10),
                **options,
            )
            assert found == expected[:batch], (c, batch)


def test_a_perfect_draft_is_used_fully() -> None:
    one = harness(costly(0.01))
    for name in "ab":
        # What plain steps take is measured once, in the first answer.
        one.submit(name, max_tokens=LENGTH)
        one.run()
    report = one.finished("b").report
    assert max(lengths(one, "b")) == 8
    assert report.tokens_per_step > 5
    assert report.is_on
    assert report.off_reason is None


def test_a_useless_draft_is_left_alone_and_the_answer_says_so() -> None:
    one = harness(costly(), draft=wrong_logits)
    one.submit("a", max_tokens=LENGTH)
    one.run()
    one.submit("b", max_tokens=LENGTH)
    one.run()
    first, second = (one.finished(name).report for name in "ab")
    assert first.is_on
    assert first.off_reason == second.off_reason == "NO_EXPECTED_GAIN"
    # What the first request taught is known when the second begins.
    assert second.num_drafted <= 8
    assert second.num_off >= LENGTH - 8 - second.num_drafted
    assert lengths(one, "a")[-20:].count(0) >= 15


def test_what_waits_for_a_slot_is_known_to_the_choice() -> None:
    one = harness(costly(0.01), max_running=2)
    for name in "abc":
        one.submit(name, max_tokens=LENGTH)
    seen: list[tuple[int, bool]] = []
    while one.worker.run_step():
        decision = one.worker._parts.steering._controller._decision
        if decision is not None:
            seen.append((len(one.live), decision.batch.is_refilled))
    assert (2, True) in seen
    assert seen[-1][1] is False
    assert all(one.finished(name).num_output == LENGTH for name in "abc")


def test_a_change_of_subject_is_followed() -> None:
    one = harness(costly(0.1), draft=right_until(43))
    one.submit("a", max_tokens=90)
    one.run()
    drafted = lengths(one, "a")
    assert max(drafted[:8]) >= 5
    # A draft token at a time goes on while the few that were judged leave a doubt.
    assert sum(drafted[-20:]) <= 24


def test_rows_of_one_batch_get_gammas_of_their_own() -> None:
    """The draft is right for contexts that begin with 1 and wrong for those that begin with 2."""

    def draft(prefix: tuple[int, ...]) -> FloatArray:
        return (counting_logits if prefix[0] == 1 else wrong_logits)(prefix)

    one = harness(table(c=0.02, token_s=0.1), draft=draft)
    one.submit("good", (1, 2), max_tokens=90)
    one.submit("bad", (2, 3), max_tokens=90)
    one.run()
    good, bad = (one.finished(name).report for name in ("good", "bad"))
    assert good.tokens_per_step > 3
    # Some of it explores: on a clock that stands still nothing is learnt of costs.
    assert bad.num_drafted < 0.6 * bad.num_steps


def test_what_a_draft_is_fed_to_catch_up_is_no_part_of_a_steps_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first draft of a request holds its prompt, also where the request joins others."""
    one = harness(costly(0.01))
    controller = one.worker._parts.steering._controller
    flags: list[bool] = []
    observe = controller.observe_all

    def noted(steps: Sequence[Taken]) -> None:
        flags.extend(step.catches_up for step in steps)
        observe(steps)

    monkeypatch.setattr(controller, "observe_all", noted)
    one.submit("a", (1, 2, 3, 4), max_tokens=40)
    for _ in range(3):
        one.worker.run_step()
    one.submit("b", (1, 2, 3, 4), max_tokens=40)
    one.run()
    assert flags[0]
    # Besides, what was missed in probes is fed after them, four tokens of each row in a step.
    assert 2 <= sum(flags) < len(flags) / 2
    assert not any(flags[-2:])


def test_rows_are_looked_at_anew_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness(costly(0.01))
    steering = one.worker._parts.steering
    count = 0
    align = steering._rows.align

    def counted(*arguments: object) -> None:
        nonlocal count
        count += 1
        align(*arguments)

    monkeypatch.setattr(steering._rows, "align", counted)
    one.submit("a", max_tokens=LENGTH)
    one.submit("b", max_tokens=LENGTH, is_enabled=False)
    one.run()
    assert 1 <= count <= 3


def test_where_drafts_pay_the_controller_is_asked_about_few_steps_and_told_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = harness(costly(0.01))
    steering = one.worker._parts.steering
    controller, num_asked, num_told = steering._controller, 0, 0
    ask, tell = controller.next_step, controller.observe_all

    def asked() -> object:
        nonlocal num_asked
        num_asked += 1
        return ask()

    def told(steps: Sequence[Taken]) -> None:
        nonlocal num_told
        num_told += len(steps)
        tell(steps)

    monkeypatch.setattr(controller, "next_step", asked)
    monkeypatch.setattr(controller, "observe_all", told)
    # A clock that stands still makes every decision due at once.
    monkeypatch.setattr(type(steering._pace), "course_s", 1e9)
    names = [f"r{index}" for index in range(6)]
    for name in names:
        one.submit(name, (3,), max_tokens=600)
        one.run()
    passes = [lengths(one, name) for name in names]
    num_steps = sum(map(len, passes))
    assert num_asked - steering.report().num_probes < num_steps / 2
    assert num_told == num_steps
    report = steering.report()
    assert report.num_steps_on + report.num_steps_off == num_steps
    assert report.num_probes > 0
    assert sum(length > 0 for each in passes for length in each) == report.num_steps_on


def test_fixed_and_disabled_requests_are_left_as_they_are() -> None:
    one = harness(costly(0.9), draft=wrong_logits)
    one.submit("auto", max_tokens=LENGTH)
    one.submit("fixed", max_tokens=LENGTH, gamma=3, drafter="model")
    one.submit("off", max_tokens=LENGTH, is_enabled=False)
    one.run()
    assert set(lengths(one, "fixed")[:-4]) == {3}
    assert one.finished("fixed").report.off_reason is None
    assert one.finished("off").report.off_reason == "DISABLED"
    assert one.tokens("auto") == one.tokens("fixed") == one.tokens("off")


def test_a_request_may_ask_for_a_choice_under_a_cap() -> None:
    one = harness(costly(0.01))
    one.submit("a", max_tokens=LENGTH, gamma=3, is_adaptive=True)
    one.submit("b", max_tokens=LENGTH, is_adaptive=False)
    one.run()
    assert max(lengths(one, "a")) == 3
    assert set(lengths(one, "b")[:-5]) == {4}


def test_without_known_costs_gamma_is_fixed() -> None:
    one = Harness("F3")
    one.submit("a", max_tokens=LENGTH, is_adaptive=True)
    one.run()
    assert set(lengths(one, "a")[:-5]) == {4}
    assert one.worker.snapshot().control is None
    assert not one.worker.default_speculation.is_adaptive


def test_the_worker_reports_what_choosing_brought() -> None:
    one = harness(costly(0.01))
    one.submit("a", max_tokens=90)
    one.run()
    control = one.worker.snapshot().control
    assert control is not None
    assert control.num_steps_on > 0
    assert control.speed_up is not None
    assert 0.0 <= control.regret < 1.0
    assert one.worker.default_speculation.is_adaptive


def test_requests_of_all_kinds_end_once_with_gamma_chosen() -> None:
    one = Harness("F4", max_batch=8, costs=table(c=0.1, slope=0.02, token_s=0.01))
    rng = np.random.default_rng(0)
    for index in range(48):
        one.submit(
            str(index),
            [int(t) for t in rng.integers(0, 4, size=rng.integers(1, 20))],
            max_tokens=int(rng.integers(1, 30)),
            drafter=("none", "lookup", "model", None)[index % 4],
            gamma=None if index % 3 else index % 9,
            is_adaptive=True if index % 5 == 0 else None,
            mode=list(ExactnessMode)[index % 3],
            temperature=float(index % 2),
            seed=index,
        )
        one.worker.run_step()
        one.check_invariants()
    one.run()
    for index in range(48):
        assert one.finished(str(index)).num_output == len(one.tokens(str(index)))
    one.check_is_idle()


def test_where_nothing_pays_the_controller_is_asked_once_in_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step is counted all the same, by the server and in each answer."""
    one = harness(costly(3.0), draft=wrong_logits)
    steering = one.worker._parts.steering
    num_asked = 0
    next_step = steering._controller.next_step

    def counted() -> object:
        nonlocal num_asked
        num_asked += 1
        return next_step()

    monkeypatch.setattr(steering._controller, "next_step", counted)
    names = [f"r{index}" for index in range(12)]
    for name in names:
        one.submit(name, (3,), max_tokens=LENGTH)
        one.run()
    drafted = [lengths(one, name) for name in names]
    num_steps = sum(map(len, drafted))
    assert num_asked < num_steps / 4
    report = steering.report()
    assert report.num_steps_on + report.num_steps_off == num_steps
    for name, passes in zip(names, drafted, strict=True):
        # The last token leaves no room for a draft: nothing was held back there.
        assert one.finished(name).report.num_off == passes[:-1].count(0)


class Broken:
    """A part of the choice that raises while it is broken."""

    def __init__(self, part: Callable[..., object]) -> None:
        self.part = part
        self.is_broken = True
        self.num_raised = 0

    def __call__(self, *args: object, **options: object) -> object:
        if self.is_broken:
            self.num_raised += 1
            raise FloatingPointError("injected")
        return self.part(*args, **options)


@pytest.mark.parametrize(
    ("owner", "part"),
    [
        ("_controller", "decide"),
        ("_controller", "next_step"),
        ("_controller", "observe_all"),
        ("_rows", "align"),
        ("_rows", "learn"),
    ],
)
def test_a_choice_that_fails_leaves_gamma_fixed_and_harms_nobody(
    owner: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = harness(costly(0.01))
    chooser = getattr(one.worker._parts.steering, owner)
    broken = Broken(getattr(chooser, part))
    monkeypatch.setattr(chooser, part, broken)
    one.submit("auto", (3,), max_tokens=LENGTH)
    one.submit("capped", (3,), max_tokens=LENGTH, gamma=3, is_adaptive=True)
    one.submit("fixed", (3,), max_tokens=LENGTH, gamma=6, drafter="model")
    one.run()
    expected = [token % 10 for token in range(4, 4 + LENGTH)]
    assert one.tokens("auto") == one.tokens("capped") == one.tokens("fixed") == expected
    assert broken.num_raised == 1
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert set(lengths(one, "auto")[2:-5]) == {4}
    assert set(lengths(one, "capped")[2:-5]) == {3}
    assert set(lengths(one, "fixed")[2:-5]) == {6}
    one.check_is_idle()

    # It is tried again, and works once it is whole.
    broken.is_broken = False
    one.clock.now += RETRY_S
    one.submit("later", (3,), max_tokens=LENGTH)
    one.run()
    assert one.tokens("later") == expected
    assert max(lengths(one, "later")) == 8
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("num_decided", "num_left", "num_new", "expected"),
    [(4, 0, 1, False), (4, 1, 1, True), (8, 1, 1, False), (1, 1, 1, True), (0, 0, 1, True)],
)
def test_a_decision_stands_while_few_rows_come_and_go(
    num_decided: int, num_left: int, num_new: int, expected: bool
) -> None:
    decided = [request() for _ in range(num_decided)]
    live = decided[num_left:] + [request() for _ in range(num_new)]
    assert are_others(live, decided) is expected


def test_a_row_that_lost_its_drafter_ends_the_steps_that_are_answered_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = harness(costly(0.01))
    steering = one.worker._parts.steering
    # A clock that stands still makes every decision due at once.
    monkeypatch.setattr(type(steering._pace), "course_s", 1e9)
    one.submit("a", (3,), max_tokens=600)
    while steering._course is None:
        assert one.worker.run_step()
    course, live = steering._course, tuple(one.worker._rows.requests)
    assert course.next(live, (8,)) is not None
    live[0].degrade(None)
    assert course.next(live, (8,)) is None


def test_steps_are_answered_alike_while_caps_only_cut_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = harness(costly(0.01))
    steering = one.worker._parts.steering
    monkeypatch.setattr(type(steering._pace), "course_s", 1e9)
    one.submit("a", (3,), max_tokens=600)
    while steering._course is None or steering._course._num_left < 4:
        assert one.worker.run_step()
    course, live = steering._course, tuple(one.worker._rows.requests)
    num_taken = course.num_taken
    assert course.next(live, (8,))[0] > 3
    assert course.next(live, (3,)) == (3,)
    assert (course.num_taken, course.held_back) == (num_taken + 2, [])
    assert course.next(live, (0,)) is None
    assert course.next(live, (None,)) is None
    assert course.next((), (8,)) is None
    course.left_s = 0.0
    assert course.next(live, (8,)) is None


def test_a_step_that_judged_nobody_teaches_nothing_and_disturbs_no_choice() -> None:
    """The first step of a request catches up; here the target's logits are not finite in it."""

    def spoilt(prefix: tuple[int, ...]) -> FloatArray:
        return counting_logits(prefix) * (np.nan if prefix[0] == 3 else 1.0)

    one = harness(costly(0.01), target=ScriptedEngine(spoilt, limits(10)))
    one.submit("bad", (3,), max_tokens=LENGTH)
    one.run()
    assert one.worker._parts.steering._retry_at_s is None
    one.submit("good", (4,), max_tokens=LENGTH)
    one.run()
    assert one.finished("good").report.is_on
