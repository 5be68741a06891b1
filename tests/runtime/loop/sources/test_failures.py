"""A source that cannot be read, or need not be any more, harms nobody but its request."""

from __future__ import annotations

import pytest
from outrider.runtime.core.errors import Cancelled
from outrider.runtime.core.params import BeamParams

from tests.runtime.markov import Clock
from tests.runtime.sourced import (
    POISON,
    SHARED_NOISE,
    Poisoned,
    answer,
    sourced,
    stable,
    submit,
)


@pytest.mark.parametrize("failing", range(4))
def test_a_read_that_fails_once_ends_nobody(failing: int) -> None:
    harness = sourced()
    harness.target.fail_reads_at(failing)
    for index in range(5):
        submit(harness, "S4", index, *stable("model"))
    harness.run()
    for index in range(5):
        assert harness.tokens(str(index)) == answer("S4", index, *SHARED_NOISE)
        assert harness.finished(str(index)).report.off_reason is None
    harness.check_is_idle()


def test_sources_that_are_read_again_are_signs_of_life() -> None:
    harness = sourced()
    harness.target.fail_reads_at(0)
    for name in "ab":
        harness.submit(name, (0,), source_tokens=(1, 2, 3))
    harness.worker.run_step()
    # The step, and each half of what failed.
    assert harness.worker.heartbeat.num_steps == 3
    assert harness.worker.heartbeat.is_recovering is False
    harness.run()
    assert harness.tokens("a") == harness.tokens("b")


@pytest.mark.parametrize("place", range(5))
def test_a_source_that_cannot_be_read_ends_its_request_alone(place: int) -> None:
    harness = sourced(target=Poisoned(), max_batch=5)
    for index in range(4):
        if index == place:
            harness.submit("poison", (0,), source_tokens=POISON)
        submit(harness, "S4", index, *stable("model"))
    if place == 4:
        harness.submit("poison", (0,), source_tokens=POISON)
    harness.run()
    assert harness.error("poison").reason == "REQUEST_QUARANTINED"
    for index in range(4):
        assert harness.tokens(str(index)) == answer("S4", index, *SHARED_NOISE)
    harness.check_is_idle()


def test_a_source_that_cannot_be_read_is_blamed_beside_rows_that_do_not_decode_yet() -> None:
    harness = sourced(target=Poisoned())
    harness.submit("poison", (0,), source_tokens=POISON)
    harness.submit("long", (2,) * 14, source_tokens=(1, 2, 3))
    harness.run()
    assert harness.error("poison").reason == "REQUEST_QUARANTINED"
    assert harness.finished("long").num_output == 12


def test_where_no_source_can_be_read_the_engine_is_blamed() -> None:
    harness = sourced()
    harness.target.fail_reads_at(*range(100))
    for name in "ab":
        harness.submit(name, (0,), source_tokens=(1, 2, 3))
    harness.run()
    assert {harness.error(name).reason for name in "ab"} == {"ENGINE_FAILED"}
    harness.check_is_idle()


@pytest.mark.parametrize("beams", [None, BeamParams(num_beams=2)])
def test_where_sources_are_read_and_no_text_is_extended_the_engine_is_blamed(
    beams: BeamParams | None,
) -> None:
    harness = sourced()
    harness.target.fail_at(*range(1000))
    for name in "ab":
        harness.submit(name, (0,), source_tokens=(1, 2, 3), beams=beams)
    harness.run()
    assert {harness.error(name).reason for name in "ab"} == {"ENGINE_FAILED"}
    harness.check_is_idle()


def test_a_failed_step_reads_no_source_again() -> None:
    harness = sourced()
    for index in range(4):
        submit(harness, "S4", index, *stable("none"))
    while harness.worker.snapshot().num_reading or len(harness.live) < 4:
        harness.worker.run_step()
    num_reads = harness.target.num_reads
    harness.target.fail_at(harness.target.num_extends)
    harness.run()
    assert harness.target.num_reads == num_reads
    for index in range(4):
        assert harness.tokens(str(index)) == answer("S4", index, *SHARED_NOISE)


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("what", ["read", "extend"])
def test_a_draft_model_that_fails_has_the_source_to_read_again(what: str, failing: int) -> None:
    harness = sourced()
    fail = harness.draft.fail_reads_at if what == "read" else harness.draft.fail_at
    fail(failing)
    for index in range(3):
        submit(harness, "S4", index, *stable("model"))
    harness.run()
    reasons = {harness.finished(str(index)).report.off_reason for index in range(3)}
    assert "DEGRADED" in reasons
    for index in range(3):
        assert harness.tokens(str(index)) == answer("S4", index, *SHARED_NOISE)
    submit(harness, "S4", 7, *stable("model"))
    harness.run()
    assert harness.finished("7").report.num_accepted > 0
    assert harness.tokens("7") == answer("S4", 7, *SHARED_NOISE)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_that_ends_while_its_source_waits_harms_nobody(how: str) -> None:
    clock = Clock()
    harness = sourced(clock=clock)
    submit(harness, "S4", 0, *stable("model"))
    harness.submit("first", (0,), source_tokens=(1,) * 24)
    harness.submit("waits", (0,), source_tokens=(2,) * 24, deadline_s=5.0)
    submit(harness, "S4", 1, *stable("model"))
    harness.worker.run_step()
    assert [one.spec.request_id for one in harness.live if one.cache.num_unread][1] == "waits"
    if how == "cancel":
        harness.worker.cancel("internal-waits", Cancelled())
    else:
        clock.now = 6.0
    harness.run()
    assert harness.error("waits").reason in ("CLIENT_CANCELLED", "DEADLINE")
    assert harness.ending("waits").num_output == 0
    for index in range(2):
        assert harness.tokens(str(index)) == answer("S4", index, *SHARED_NOISE)
    assert harness.finished("first").num_output == 12
    harness.check_is_idle()


def test_a_copy_that_raises_behind_another_source_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = sourced(max_batch=4)
    move, raised = harness.target.move_slot, []

    def moving(source: int, destination: int, num_tokens: int) -> None:
        if not raised:
            raised.append(destination)
            raise RuntimeError("a bug")
        move(source, destination, num_tokens)

    monkeypatch.setattr(harness.target, "move_slot", moving)
    harness.submit("a", (0,), source_tokens=(1, 2, 3), max_tokens=4)
    harness.submit_group("g", (0,), 2, source_tokens=(1, 2, 3), max_tokens=4)
    harness.run()
    assert raised
    for name in ("a", "g.0", "g.1"):
        assert harness.finished(name).num_output == 4
