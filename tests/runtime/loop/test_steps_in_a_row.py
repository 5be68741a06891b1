"""Steps in a row are accounted for together, and nobody can tell but by the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.errors import Cancelled, InternalError
from outrider.runtime.core.params import Event, Failed, Finished, Progressed
from outrider.runtime.loop.step import MOST_IN_A_ROW

from tests.runtime.markov import Clock, Harness, counting_logits, limits

STEP_S = 0.001
NONE_IN_A_ROW = 0.0


class TickingEngine(ScriptedEngine):
    """Counts modulo 10; every call takes ``STEP_S``, and something may happen meanwhile."""

    def __init__(self, clock: Clock, meanwhile: Callable[[int], None]) -> None:
        super().__init__(counting_logits, limits(10, max_batch=2))
        self._clock = clock
        self._meanwhile = meanwhile

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self._clock.now += STEP_S
        self._meanwhile(self.num_extends)
        return super().extend(spans)


def ticking(meanwhile: Callable[[int], None] = lambda call: None, **settings: object) -> Harness:
    """A worker whose steps take time."""
    clock = Clock()
    engine = TickingEngine(clock, meanwhile)
    return Harness(target=engine, has_draft=False, max_batch=2, clock=clock, **settings)


def begun(harness: Harness, name: str = "a", **options: object) -> int:
    """Submit a request and take the step that yields its first token; calls of the target so far."""
    harness.submit(name, (1,), is_enabled=False, **{"max_tokens": 90, **options})
    while not harness.events[name]:
        harness.worker.run_step()
    assert len(harness.tokens(name)) == 1, "nobody waits for a first token"
    return calls(harness)


def calls(harness: Harness) -> int:
    engine = harness.target
    assert isinstance(engine, ScriptedEngine)
    return engine.num_extends


def test_steps_follow_each_other_for_a_share_of_the_interval() -> None:
    harness = ticking(message_interval_s=0.02)
    before = begun(harness)
    harness.worker.run_step()
    # The one that ends at that time or behind it is the last.
    assert calls(harness) - before == 4
    assert len(harness.tokens("a")) == 5
    assert [len(one.tokens) for one in progress(harness, "a")] == [1] * 5


def test_whoever_wants_every_message_gets_every_step() -> None:
    harness = ticking(message_interval_s=NONE_IN_A_ROW)
    before = begun(harness)
    harness.worker.run_step()
    assert calls(harness) - before == 1


def test_there_are_never_more_than_so_many() -> None:
    harness = ticking(message_interval_s=1e6)
    before = begun(harness)
    harness.worker.run_step()
    assert calls(harness) - before == MOST_IN_A_ROW


def test_each_step_is_counted() -> None:
    harness = ticking()
    begun(harness, max_tokens=40)
    harness.run()
    assert harness.worker.snapshot().step_count == 40
    assert harness.finished("a").report.num_steps == 40


def test_one_who_arrives_waits_for_the_step_under_way_alone() -> None:
    harness = ticking(lambda call: arrive() if call == 3 else None)

    def arrive() -> None:
        harness.submit("b", (5,), is_enabled=False)

    begun(harness)
    harness.worker.run_step()
    assert calls(harness) == 4
    harness.worker.run_step()
    assert harness.tokens("b") == [6]


def test_one_who_finds_no_slot_does_not_keep_the_others_back() -> None:
    harness = ticking(message_interval_s=0.02)
    begun(harness, "a")
    before = begun(harness, "b")
    harness.submit("waits", (5,), is_enabled=False)
    harness.worker.run_step()
    assert calls(harness) - before == 4


def test_one_who_leaves_waits_for_the_step_under_way_alone() -> None:
    harness = ticking(lambda call: leave() if call == 3 else None)

    def leave() -> None:
        harness.worker.cancel("internal-a", Cancelled("client"))

    begun(harness)
    harness.worker.run_step()
    assert calls(harness) == 4
    harness.worker.run_step()
    assert isinstance(harness.error("a"), Cancelled)
    harness.check_is_idle()


def test_text_that_may_end_an_answer_is_looked_at_after_every_step() -> None:
    harness = ticking()
    begun(harness, "a", stop_strings=("zzz",))
    before = calls(harness)
    harness.worker.run_step()
    assert calls(harness) - before == 1


def test_what_was_decoded_before_a_failure_is_told_before_it() -> None:
    harness = ticking()
    begun(harness)
    engine = harness.target
    assert isinstance(engine, ScriptedEngine)
    engine.fail_at(engine.num_extends + 3)
    harness.run()
    assert harness.tokens("a") == [2, 3, 4, 5]
    assert harness.error("a").__class__.__name__ == "RequestFailed"
    harness.check_is_idle()


def test_a_row_that_is_not_finite_ends_alone_and_late_ones_go_on() -> None:
    def logits(prefix: tuple[int, ...]) -> FloatArray:
        if prefix[0] == 7 and len(prefix) == 5:
            return np.full(10, np.nan, dtype=np.float32)
        return counting_logits(prefix)

    harness = Harness(target=ScriptedEngine(logits, limits(10)), has_draft=False)
    for first in (1, 7):
        harness.submit(str(first), (first,), is_enabled=False, max_tokens=20)
    harness.run()
    assert harness.tokens("7") == [8, 9, 0, 1]
    assert harness.tokens("1") == [(2 + i) % 10 for i in range(20)]
    assert isinstance(harness.ending("1"), Finished)
    harness.check_is_idle()


REQUESTS: list[dict[str, object]] = [
    {"is_enabled": False},
    {"drafter": "model", "gamma": 3},
    {"drafter": "model", "gamma": 3, "temperature": 1.0},
    {"drafter": "model", "gamma": 2, "temperature": 1.0, "mode": ExactnessMode.SEED_STABLE},
    {"drafter": "lookup", "gamma": 4},
    {"drafter": "suffix+model", "gamma": 4, "end_tokens": (3,)},
    {"drafter": "ouroboros", "gamma": 4},
    {"drafter": "model", "gamma": 3, "stop_strings": ("d",)},
    {"is_enabled": False, "temperature": 1.0, "end_tokens": (2,), "include_stop": True},
]


@pytest.mark.parametrize("pair", ["F3", "F4"])
def test_everyone_is_told_the_same_with_steps_in_a_row(pair: str) -> None:
    told = []
    for interval_s in (NONE_IN_A_ROW, 1.0):
        harness = Harness(pair, max_batch=4, message_interval_s=interval_s)
        for number, options in enumerate(REQUESTS):
            end = 30 + 3 * number
            harness.submit(str(number), (1, 2), max_tokens=end, **options)
        harness.run()
        harness.check_is_idle()
        told.append([list(map(repr, harness.events[str(n)])) for n in range(len(REQUESTS))])
    assert told[0] == told[1]


def progress(harness: Harness, name: str) -> list[Progressed]:
    events: list[Event] = harness.events[name]
    return [event for event in events if isinstance(event, Progressed)]


def test_a_bug_in_a_later_step_ends_nobody_before_the_steps_before_it_are_told() -> None:
    def break_down(call: int) -> None:
        if call == 4:
            raise RuntimeError("a bug, and no engine's error")

    harness = ticking(break_down)
    before = begun(harness)
    harness.worker.run_step()
    told, last = harness.tokens("a"), harness.events["a"][-1]
    # Steps that were taken, the first token included; the call that broke down is none of them.
    assert told == list(range(2, 2 + calls(harness) - before + 1))
    assert len(told) > 2
    assert isinstance(last, Failed)
    assert isinstance(last.error, InternalError)
    assert last.num_output == len(told)
