"""Requests end exactly once, and the slot count returns to full."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines.base import EngineError
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import BreakerConfig
from outrider.runtime.core.errors import (
    Cancelled,
    ConfigError,
    ContextTooLong,
    Draining,
    DuplicateRequestId,
    Overloaded,
)
from outrider.runtime.core.events import Event, Failed, Finished
from outrider.runtime.core.params import BeamParams
from outrider.runtime.core.request import Request

from tests.runtime.markov import Harness, counting_logits, limits, spec


def test_sixty_four_mixed_requests_all_end_once() -> None:
    harness = Harness("F4", max_batch=8)
    rng = np.random.default_rng(0)
    drafters = ["none", "lookup", "model"]
    modes = list(ExactnessMode)
    for index in range(64):
        harness.submit(
            str(index),
            [int(t) for t in rng.integers(0, 4, size=rng.integers(1, 20))],
            max_tokens=int(rng.integers(1, 30)),
            drafter=drafters[index % 3],
            gamma=index % 9,
            mode=modes[index % len(modes)],
            temperature=float(index % 2),
            end_tokens=(3,) if index % 5 == 0 else (),
            seed=index,
        )
        harness.worker.run_step()
        harness.check_invariants()
        if index % 7 == 0:
            harness.worker.cancel(f"internal-{index}", Cancelled("client"))
    harness.run()
    endings = [harness.ending(str(index)) for index in range(64)]
    assert sum(isinstance(ending, Finished) for ending in endings) >= 54
    assert harness.worker.snapshot().num_finished + harness.worker.snapshot().num_failed == 64
    harness.check_is_idle()


def test_cancelled_request_frees_its_slot_within_one_step() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=50)
    harness.submit("waiting", max_tokens=3)
    harness.worker.run_step()
    harness.worker.cancel("internal-a", Cancelled("abort"))
    harness.worker.run_step()
    assert harness.error("a").reason == "ABORTED_BY_RPC"
    assert harness.events["waiting"]
    harness.run()
    assert harness.finished("waiting").num_output == 3
    harness.check_is_idle()


def test_a_queued_request_can_be_cancelled() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=5)
    harness.worker.run_step()
    harness.submit("waiting")
    harness.worker.cancel("internal-waiting", Cancelled("client"))
    harness.run()
    assert harness.error("waiting").reason == "CLIENT_CANCELLED"
    assert harness.finished("a").num_output == 5


def test_cancelling_what_has_ended_changes_nothing() -> None:
    harness = Harness()
    harness.submit("a")
    harness.run()
    harness.worker.cancel("internal-a", Cancelled("client"))
    harness.worker.cancel("internal-unknown", Cancelled("client"))
    harness.run()
    assert harness.finished("a").num_output == 12


def test_a_deadline_ends_running_and_queued_requests() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=50, deadline_s=5.0)
    harness.submit("waiting", deadline_s=5.0)
    harness.worker.run_step()
    harness.clock.now = 5.0
    harness.run()
    assert harness.error("a").reason == harness.error("waiting").reason == "DEADLINE"
    assert harness.error("a").num_output == len(harness.tokens("a")) > 0
    harness.check_is_idle()


def test_waiting_too_long_for_a_slot_ends_a_request() -> None:
    harness = Harness(max_batch=1, queue_timeout_s=3.0)
    harness.submit("a", max_tokens=20, is_enabled=False)
    harness.submit("waiting")
    harness.worker.run_step()
    harness.clock.now = 3.5
    harness.run()
    assert harness.error("waiting").reason == "QUEUE_TIMEOUT"
    assert harness.error("waiting").waited_s == 3.5
    assert harness.finished("a").num_output == 20


@pytest.mark.parametrize("num_beams", [None, 2])
def test_who_has_ended_and_is_not_told_yet_does_not_wait_for_a_slot(num_beams: int | None) -> None:
    """Seen from another thread: a slot that was given back is none that is waited for."""
    harness = Harness(max_batch=2)
    beams = None if num_beams is None else BeamParams(num_beams=num_beams)
    harness.submit("a", max_tokens=3, temperature=0.0, beams=beams)
    harness.submit("waiting", max_tokens=3)
    harness.submit("too", max_tokens=3)
    seen, worker = [], harness.worker
    free = worker._rows.free

    def watched(requests: Sequence[Request]) -> list[Request]:
        lost = free(requests)
        seen.extend(worker.is_queued(f"internal-{one.spec.request_id}") for one in requests)
        return lost

    worker._rows.free = watched
    worker.run_step()
    assert worker.is_queued("internal-too")
    harness.run()
    assert seen == [False, False, False]


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    harness = Harness(max_batch=1, max_queued=2, retry_after_s=4.0)
    for name in ("runs", "first", "second"):
        harness.submit(name, max_tokens=2)
    with pytest.raises(Overloaded) as refusal:
        harness.submit("third")
    assert refusal.value.retry_after_s == 4.0
    harness.run()
    harness.submit("third")
    harness.run()
    assert harness.finished("third").num_output == 12


def test_queued_tokens_are_bounded() -> None:
    harness = Harness(max_batch=1, max_queued_tokens=10)
    harness.submit("runs", (1,) * 20, max_tokens=9)
    harness.worker.run_step()
    harness.submit("fits", (1,) * 10)
    with pytest.raises(Overloaded):
        harness.submit("too much", (1,))


def test_a_name_is_free_again_once_its_request_ended() -> None:
    harness = Harness()
    harness.submit("a")
    with pytest.raises(DuplicateRequestId):
        harness.submit("a")
    harness.run()
    harness.submit("a")
    harness.run()
    assert harness.finished("a").num_output == 12


def test_a_name_is_free_for_whoever_is_told_that_its_request_ended() -> None:
    harness = Harness(max_batch=1)
    second: list[Event] = []

    def submit_again(event: Event) -> None:
        if isinstance(event, Finished):
            harness.worker.submit(spec("same", max_tokens=1), second.append)

    harness.worker.submit(spec("same", max_tokens=1), submit_again)
    while harness.worker.run_step():
        pass
    assert isinstance(second[-1], Finished)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    harness = Harness()
    with pytest.raises(ContextTooLong) as refusal:
        harness.submit("a", (1,) * 96)
    assert (refusal.value.limit, refusal.value.given) == (96, 97)


def test_draining_ends_the_queued_and_lets_the_running_finish() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=20)
    harness.submit("waiting")
    harness.worker.run_step()
    harness.worker.drain()
    with pytest.raises(Draining):
        harness.submit("new")
    harness.run()
    assert harness.error("waiting").reason == "DRAINING"
    assert harness.finished("a").num_output == 20


def test_stopping_ends_what_still_runs_at_its_deadline() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=50)
    harness.worker.run_step()
    assert harness.worker.stop(0.0)
    assert harness.error("a").reason == "DRAIN_DEADLINE"
    assert harness.error("a").num_output == len(harness.tokens("a"))
    harness.check_is_idle()


def test_without_a_draft_the_default_drafter_is_plain_decoding() -> None:
    harness = Harness(has_draft=False)
    harness.submit("a")
    harness.submit("b", drafter="lookup", gamma=2)
    harness.run()
    assert harness.finished("a").report.off_reason == "NO_DRAFT"
    assert not harness.finished("a").report.is_on
    assert harness.finished("b").report.is_on


def test_an_unknown_default_drafter_is_refused_at_start() -> None:
    with pytest.raises(ConfigError):
        Harness(default_drafter="oracle")


def test_a_bug_that_one_request_triggers_ends_it_alone(caplog) -> None:
    def broken(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix[0] == 9:
            raise ZeroDivisionError
        return counting_logits(prefix)

    harness = Harness(target=ScriptedEngine(broken, limits(10)))
    harness.submit("other")
    harness.submit("bad", (9, 1))
    harness.run()
    assert harness.error("bad").reason == "REQUEST_QUARANTINED"
    assert harness.finished("other").num_output == 12
    harness.check_is_idle()
    assert harness.error("bad").error_id in caplog.text


def test_a_row_that_cannot_be_moved_ends_alone() -> None:
    class OnceImmovable(ScriptedEngine):
        has_failed = False

        def move_slot(self, source: int, destination: int, length: int) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise EngineError("cannot move")
            super().move_slot(source, destination, length)

    harness = Harness(target=OnceImmovable(counting_logits, limits(10)), has_draft=False)
    harness.submit("short", max_tokens=5)
    harness.submit("middle", max_tokens=9)
    harness.submit("last", max_tokens=9)
    harness.run()
    assert harness.finished("short").num_output == 5
    assert harness.error("last").reason == "ENGINE_FAILED"
    assert harness.finished("middle").num_output == 9
    harness.check_is_idle()


def test_a_row_that_cannot_be_moved_twice_in_a_step_ends_once() -> None:
    class Immovable(ScriptedEngine):
        def move_slot(self, source: int, destination: int, length: int) -> None:
            raise EngineError("cannot move")

    harness = Harness(target=Immovable(counting_logits, limits(10)), has_draft=False)
    for name in ("short", "shorter"):
        harness.submit(name, (1,), max_tokens=3)
    harness.submit("last", (1,), max_tokens=9)
    harness.run()
    assert harness.finished("short").num_output == harness.finished("shorter").num_output == 3
    assert harness.error("last").reason == "ENGINE_FAILED"
    harness.check_is_idle()


def test_a_receiver_that_raises_harms_no_neighbour() -> None:
    harness = Harness()

    def gone(event: Event) -> None:
        raise RuntimeError("the loop is closed")

    harness.worker.submit(spec("gone"), gone)
    harness.submit("a")
    harness.run()
    assert harness.finished("a").num_output == 12
    harness.check_is_idle()


def test_a_bug_behind_the_freeing_of_a_slot_still_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    harness.submit("short", max_tokens=2, is_enabled=False)
    harness.submit("long", max_tokens=30)

    def broken(_request: Request) -> None:
        raise ArithmeticError("a bug in the figures")

    with monkeypatch.context() as patch:
        patch.setattr(Request, "report", broken)
        harness.run()
    assert harness.error("short").reason == harness.error("long").reason == "INTERNAL"
    harness.check_is_idle()
    harness.submit("later")
    harness.run()
    assert harness.finished("later").num_output == 12


def test_the_snapshot_counts_what_was_emitted() -> None:
    harness = Harness()
    harness.submit("a", drafter="model", gamma=2)
    harness.clock.now = 2.5
    harness.run()
    snapshot = harness.worker.snapshot()
    report = harness.finished("a").report
    assert snapshot.num_emitted == 12
    assert snapshot.num_target_passes == report.num_steps
    assert snapshot.num_drafted == report.num_drafted
    assert snapshot.num_accepted == report.num_accepted > 0
    assert snapshot.accepted_by_position == report.accepted_by_position
    assert snapshot.last_step_at == 2.5
    assert snapshot.step_count >= report.num_steps


def test_the_thread_serves_and_stops() -> None:
    harness = Harness()
    ended = {str(index): threading.Event() for index in range(12)}
    events: dict[str, list[Event]] = {name: [] for name in ended}

    def deliver_to(name: str):
        def deliver(event: Event) -> None:
            events[name].append(event)
            if isinstance(event, Finished | Failed):
                ended[name].set()

        return deliver

    harness.worker.start()
    for name in ended:
        harness.worker.submit(spec(name, max_tokens=8, gamma=2), deliver_to(name))
    assert all(end.wait(20.0) for end in ended.values())
    assert harness.worker.stop(5.0)
    assert all(isinstance(received[-1], Finished) for received in events.values())
    harness.check_is_idle()
    with pytest.raises(Draining):
        harness.submit("late")


def test_the_thread_ends_queued_requests_when_it_stops() -> None:
    harness = Harness(max_batch=1)
    harness.submit("a", max_tokens=5)
    harness.submit("waiting")
    harness.worker.drain()
    harness.worker.start()
    assert harness.worker.stop(5.0)
    assert harness.error("waiting").reason == "DRAINING"


def test_engines_are_told_what_stays_when_a_request_leaves() -> None:
    class Trimmed(ScriptedEngine):
        def trim(self, lengths: Sequence[int]) -> None:
            super().trim(lengths)
            trimmed.append(list(lengths))

    trimmed: list[list[int]] = []
    harness = Harness(target=Trimmed(counting_logits, limits(10)), has_draft=False)
    harness.submit("short", (1,), max_tokens=2)
    harness.submit("long", (1,), max_tokens=4)
    harness.run()
    assert trimmed == [[2], []]
    assert harness.target.tokens_of(0) == ()


def test_a_cache_that_cannot_shrink_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Unshrinkable(ScriptedEngine):
        def trim(self, lengths: Sequence[int]) -> None:
            raise EngineError("no memory")

    target = Unshrinkable(counting_logits, limits(10))
    harness = Harness(target=target, draft=Unshrinkable(counting_logits, limits(10)))
    harness.submit("short", (1,), max_tokens=2, is_enabled=False)
    harness.submit("long", (1,), max_tokens=4, is_enabled=False)
    harness.run()
    assert harness.tokens("short") == [2, 3]
    assert harness.tokens("long") == [2, 3, 4, 5]
    assert len(caplog.records) == 4
    harness.check_is_idle()


def always_failing() -> ScriptedEngine:
    return ScriptedEngine(counting_logits, limits(10), failing_extends=range(1000))


def test_a_draft_model_that_keeps_failing_is_left_alone_for_a_while() -> None:
    draft = always_failing()
    breaker = BreakerConfig(max_failures=2, first_pause_s=10.0, longest_pause_s=15.0)
    harness = Harness(draft=draft, breaker=breaker)

    def serve(name: str) -> tuple[str | None, int]:
        """The reason told, and the calls the draft model was given."""
        before = draft.num_extends
        harness.submit(name, drafter="model", gamma=3)
        harness.run()
        assert harness.tokens(name) == [(4 + index) % 10 for index in range(12)]
        return harness.finished(name).report.off_reason, draft.num_extends - before

    assert [serve("1"), serve("2")] == [("DEGRADED", 1)] * 2
    assert [serve("3"), serve("4")] == [("DRAFTER_PAUSED", 0)] * 2
    harness.clock.now = 10.0
    assert [serve("5"), serve("6")] == [("DEGRADED", 1), ("DRAFTER_PAUSED", 0)]
    harness.clock.now = 24.9
    assert serve("7") == ("DRAFTER_PAUSED", 0)
    harness.clock.now = 25.0
    assert serve("8") == ("DEGRADED", 1)


def test_a_draft_model_that_recovers_is_used_again() -> None:
    draft = ScriptedEngine(counting_logits, limits(10), failing_extends=(0, 1))
    harness = Harness(draft=draft, breaker=BreakerConfig(max_failures=1, first_pause_s=1.0))
    reasons = []
    for now in (0.0, 0.5, 1.0, 3.0, 3.0):
        harness.clock.now = now
        harness.submit("a", drafter="model", gamma=3)
        harness.run()
        reasons.append(harness.finished("a").report.off_reason)
    assert reasons == ["DEGRADED", "DRAFTER_PAUSED", "DEGRADED", None, None]


def test_no_spelling_gets_a_failing_drafter_another_try() -> None:
    draft = always_failing()
    breaker = BreakerConfig(max_failures=2, first_pause_s=9.0)
    harness = Harness(draft=draft, breaker=breaker)
    # Nothing repeats in the prompt, so lookup proposes nothing and the model is asked behind it.
    spellings = (
        "lookup+model",
        "model:1",
        "model:2",
        "model+lookup",
        "suffix:1+model:2+none",
        "model",
    )
    reasons = []
    for name in spellings:
        harness.submit(name, (1, 7), drafter=name, gamma=3, max_tokens=4)
        harness.run()
        reasons.append(harness.finished(name).report.off_reason)
    assert reasons == ["DEGRADED", "DEGRADED", *["DRAFTER_PAUSED"] * 4]
    assert draft.num_extends == 2
    harness.submit("healthy", (1, 2, 1, 2), drafter="lookup", gamma=3)
    harness.run()
    assert harness.finished("healthy").report.off_reason is None


def test_a_pause_leaves_what_does_not_need_the_draft_model() -> None:
    breaker = BreakerConfig(max_failures=1, first_pause_s=9.0)
    harness = Harness(draft=always_failing(), breaker=breaker)
    for name in ("first", "second"):
        harness.submit(name, (1, 2, 1, 2), drafter="model+lookup", gamma=3)
        harness.run()
    report = harness.finished("second").report
    assert (report.drafter, report.off_reason) == ("lookup", "DRAFTER_PAUSED")
    assert report.num_drafted > 0
    harness.submit("third", (1, 2, 1, 2), drafter="lookup", gamma=3)
    harness.run()
    assert harness.finished("third").report.off_reason is None
