"""How long a request waited, was read and decoded, and what the slots hold meanwhile, on a clock moved by hand."""

from __future__ import annotations

from outrider.runtime.core.errors import Cancelled
from outrider.runtime.core.events import Failed, Times
from outrider.runtime.core.params import BeamParams

from tests.runtime.markov import Clock, Harness


def step(harness: Harness, clock: Clock, took_s: float) -> None:
    """A step at whose end the clock has moved; what it does is taken to happen at its beginning."""
    harness.worker.run_step()
    clock.now += took_s


def test_a_request_s_time_is_split_at_its_slot_and_its_first_token():
    clock = Clock()
    harness = Harness(max_batch=1, clock=clock)
    harness.submit("a", [1, 2, 3], max_tokens=2, gamma=0)
    clock.now += 2.0  # nobody steps
    step(harness, clock, 4.0)  # slot and first token
    harness.submit("b", list(range(6)), max_tokens=3, gamma=0)  # a prompt of two chunks
    step(harness, clock, 8.0)  # the end of a
    assert harness.finished("a").times == Times(queued_s=2.0, prefill_s=0.0, decode_s=4.0)
    step(harness, clock, 16.0)  # b's slot and first chunk
    step(harness, clock, 32.0)  # its first token
    step(harness, clock, 64.0)
    harness.run()
    assert harness.finished("b").times == Times(queued_s=8.0, prefill_s=16.0, decode_s=96.0)


def test_who_ends_early_has_the_parts_it_reached():
    clock = Clock()
    harness = Harness(max_batch=1, clock=clock)
    harness.submit("a", max_tokens=50)
    harness.submit("waiting")
    step(harness, clock, 1.0)
    clock.now += 2.0
    for name in ("a", "waiting"):
        harness.worker.cancel(f"internal-{name}", Cancelled("client"))
    harness.run()
    ends = {name: harness.ending(name) for name in ("a", "waiting")}
    assert all(isinstance(end, Failed) for end in ends.values())
    assert ends["a"].times == Times(queued_s=0.0, prefill_s=0.0, decode_s=3.0)
    assert ends["waiting"].times == Times(queued_s=3.0)


def test_a_beam_search_has_its_whole_answer_at_once():
    clock = Clock()
    harness = Harness("F4", clock=clock)
    harness.submit("a", [1, 2, 3], max_tokens=4, beams=BeamParams(num_beams=2))
    num_steps = 0
    while harness.worker.run_step():
        num_steps += 1
        clock.now += 1.0
    assert harness.finished("a").times == Times(queued_s=0.0, prefill_s=num_steps - 1.0)


def test_slots_tell_the_tokens_they_hold():
    harness = Harness("F4")
    harness.submit("a", [1, 2, 3], max_tokens=5, gamma=0)
    harness.submit("b", [1, 2], max_tokens=9, beams=BeamParams(num_beams=2))
    assert harness.worker.snapshot().num_kv_tokens == 0
    harness.worker.run_step()
    (search,) = harness.worker._rows.searches
    held = sum(search.cache.lengths)
    assert held > 0
    assert harness.worker.snapshot().num_kv_tokens == 3 + held
    harness.run()
    assert harness.worker.snapshot().num_kv_tokens == 0


def test_steps_are_counted_by_what_they_took():
    clock = Clock()
    harness = Harness(clock=clock)
    harness.submit("a", max_tokens=5, gamma=0)
    harness.run()
    told = harness.worker.snapshot()
    assert sum(told.steps_by_s) == told.step_count == 5
    assert told.step_s == 0.0 and told.steps_by_s[0] == 5
