"""A drafter chosen per request: the fastest is found, whatever it is, and no token depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import check_drafter
from outrider.runtime.core.errors import ConfigError, Overloaded, RequestError

from tests.runtime.gamma.test_adaptive import wrong_logits
from tests.runtime.gamma.test_controller import table
from tests.runtime.loop.test_step import PROMPTS, plain
from tests.runtime.markov import PAIRS, Clock, Harness, counting_logits, limits

ARMS = ("model", "lookup")


class TimedEngine(ScriptedEngine):
    """Every call takes its time on a clock."""

    def __init__(self, logits, vocab_size: int, clock: Clock, seconds: float) -> None:
        super().__init__(logits, limits(vocab_size))
        self._clock = clock
        self._seconds = seconds

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self._clock.now += self._seconds
        return super().extend(spans)


def harness(draft_logits, *, draft_s: float, pair: str = "F3", **settings: object) -> Harness:
    clock = Clock()
    vocab_size, target_logits, _ = PAIRS[pair]
    one = Harness(
        pair,
        target=TimedEngine(target_logits, vocab_size, clock, 1.0),
        draft=TimedEngine(draft_logits, vocab_size, clock, draft_s),
        clock=clock,
        **{"default_drafter": "auto", "auto_drafters": ARMS, **settings},
    )
    return one


def drafters(one: Harness, count: int) -> Counter[str]:
    for index in range(count):
        one.submit(str(index), max_tokens=20)
        one.run()
    return Counter(one.finished(str(index)).report.drafter for index in range(count))


@pytest.mark.parametrize("has_costs", [True, False])
def test_a_draft_model_that_is_always_right_and_cheap_is_kept(has_costs: bool) -> None:
    costs = table(c=0.02) if has_costs else None
    assert drafters(harness(counting_logits, draft_s=0.02, costs=costs), 24)["model"] >= 18


@pytest.mark.parametrize("has_costs", [True, False])
def test_a_draft_model_that_costs_more_than_it_brings_is_left(has_costs: bool) -> None:
    """Its fixed gamma makes every step a waste; the text repeats, so that lookup is right."""
    costs = table(c=0.5) if has_costs else None
    one = harness(wrong_logits, draft_s=0.5, costs=costs, default_gamma=4)
    assert drafters(one, 24)["lookup"] >= 18


@pytest.mark.parametrize("mode", [ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE])
def test_no_token_depends_on_the_choice(mode: ExactnessMode) -> None:
    """Greedy and seed_stable answers are those of plain decoding, whatever was chosen before."""
    options = {"temperature": float(mode is ExactnessMode.SEED_STABLE), "mode": mode}
    expected = plain("F4", **options)
    one = harness(PAIRS["F4"][2], draft_s=0.1, pair="F4", default_gamma=3)
    chosen = set()
    for turn in range(3):
        for index, tokens in enumerate(expected):
            name = f"{turn}-{index}"
            one.submit(name, PROMPTS[index], seed=index, max_tokens=10 + index, **options)
            one.run()
            assert one.tokens(name) == tokens
            chosen.add(one.finished(name).report.drafter)
    assert chosen == set(ARMS)


def test_requests_that_never_ran_are_not_held_against_anyone() -> None:
    one = harness(counting_logits, draft_s=0.02, max_running=1, max_queued=0)
    one.submit("first", drafter="lookup")
    for index in range(7):
        with pytest.raises(Overloaded):
            one.submit(f"refused {index}")
    one.worker.cancel("internal-first", RuntimeError("gone"))
    one.run()
    assert one.worker._policy.speeds == {}
    one.submit("next")
    one.run()
    assert one.finished("next").report.drafter == "model"


def test_without_a_draft_model_the_choice_is_among_the_rest() -> None:
    one = Harness("F3", has_draft=False, default_drafter="auto")
    one.submit("a", max_tokens=20)
    one.run()
    assert one.finished("a").report.drafter == "suffix"
    one = Harness("F3", has_draft=False, default_drafter="auto", auto_drafters=("model",))
    one.submit("a", max_tokens=20)
    one.run()
    assert one.finished("a").report.off_reason == "NO_DRAFT"


def test_one_that_asks_for_a_drafter_or_for_none_gets_it() -> None:
    one = harness(counting_logits, draft_s=0.02)
    one.submit("lookup", drafter="lookup")
    one.submit("off", is_enabled=False)
    one.submit("auto", drafter="auto")
    one.run()
    reports = {name: one.finished(name).report for name in ("lookup", "off", "auto")}
    assert reports["lookup"].drafter == "lookup"
    assert reports["off"].off_reason == "DISABLED"
    assert reports["auto"].drafter == "model"
    assert set(one.worker._policy.speeds) == {"model"}


def test_names_that_make_no_sense_are_refused() -> None:
    for name in ("auto+lookup", "model/auto", "lookup+auto"):
        with pytest.raises(RequestError, match="auto stands alone"):
            check_drafter(name, ("auto", "model", "lookup"), ("lookup",))
    with pytest.raises(ConfigError, match="auto_drafters"):
        ServerConfig(auto_drafters=("model", "auto"))
    with pytest.raises(ConfigError, match="auto_drafters"):
        ServerConfig(auto_drafters=())
    with pytest.raises(ConfigError, match="auto_drafters"):
        Harness("F3", auto_drafters=("model", "nobody"))
