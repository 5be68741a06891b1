"""Requests whose gamma is chosen step by step: the same answers, and drafts only where they pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from outrider.engines.base import FloatArray
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.events import Progressed
from outrider.runtime.gamma.controller import RETRY_S
from outrider.runtime.gamma.costs import CostTable

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


def test_a_change_of_subject_is_followed() -> None:
    one = harness(costly(0.1), draft=right_until(43))
    one.submit("a", max_tokens=90)
    one.run()
    drafted = lengths(one, "a")
    assert max(drafted[:8]) >= 5
    # A draft token at a time goes on while the few that were judged leave a doubt.
    assert sum(drafted[-20:]) <= 24


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


def test_a_step_that_judged_nobody_teaches_nothing_and_disturbs_no_choice() -> None:
    """The first step of a request catches up; here the target's logits are not finite in it."""

    def spoilt(prefix: tuple[int, ...]) -> FloatArray:
        return counting_logits(prefix) * (np.nan if prefix[0] == 3 else 1.0)

    one = harness(costly(0.01), target=ScriptedEngine(spoilt, limits(10)))
    one.submit("bad", (3,), max_tokens=LENGTH)
    one.run()
    assert one.worker._parts.gamma_controller._fixed_until_s < 0.0
    one.submit("good", (4,), max_tokens=LENGTH)
    one.run()
    assert one.finished("good").report.is_on


@pytest.mark.parametrize("part", ["_choose", "_observe"])
def test_a_choice_that_fails_harms_no_request(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gammas are fixed for a while; then they are chosen again."""
    one = harness(costly(0.01))
    gamma_controller = one.worker._parts.gamma_controller
    broken = Broken(getattr(gamma_controller, part))
    monkeypatch.setattr(gamma_controller, part, broken)
    one.submit("a", max_tokens=LENGTH)
    one.run()
    assert broken.num_raised == 1
    broken.is_broken = False
    one.clock.now += RETRY_S
    one.submit("b", max_tokens=LENGTH)
    one.run()
    assert one.tokens("b") == one.tokens("a")
    assert max(lengths(one, "b")) > 4
