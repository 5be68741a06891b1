"""What happens while a step is under way, or ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.core.errors import Cancelled, RequestFailed
from outrider.runtime.core.events import Failed, Finished

from tests.runtime.markov import Clock, Harness, counting_logits, limits

STEP_S = 0.001


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


def ticking(meanwhile: Callable[[int], None] = lambda call: None) -> Harness:
    """A worker whose steps take time."""
    clock = Clock()
    engine = TickingEngine(clock, meanwhile)
    return Harness(target=engine, has_draft=False, max_batch=2, clock=clock)


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
    while calls(harness) < 4:
        harness.worker.run_step()
    assert harness.events["b"] == []
    harness.worker.run_step()
    assert harness.tokens("b") == [6]


def test_one_who_leaves_waits_for_the_step_under_way_alone() -> None:
    harness = ticking(lambda call: leave() if call == 3 else None)

    def leave() -> None:
        harness.worker.cancel("internal-a", Cancelled("client"))

    begun(harness)
    while calls(harness) < 4:
        harness.worker.run_step()
    assert len(harness.tokens("a")) == 4
    harness.worker.run_step()
    assert isinstance(harness.error("a"), Cancelled)
    harness.check_is_idle()


def test_what_was_decoded_before_a_failure_is_told_before_it() -> None:
    harness = ticking()
    begun(harness)
    engine = harness.target
    assert isinstance(engine, ScriptedEngine)
    engine.fail_at(engine.num_extends + 3, engine.num_extends + 4)
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


def test_a_bug_in_a_step_ends_nobody_before_the_steps_before_it_are_told() -> None:
    def break_down(call: int) -> None:
        if call >= 4:
            raise RuntimeError("a bug, and no engine's error")

    harness = ticking(break_down)
    begun(harness)
    harness.run()
    told, last = harness.tokens("a"), harness.events["a"][-1]
    assert told == [2, 3, 4, 5]
    assert isinstance(last, Failed)
    assert isinstance(last.error, RequestFailed)
    assert last.num_output == len(told)
    harness.check_is_idle()
