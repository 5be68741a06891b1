"""Events of a step reach the event loop together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from outrider.runtime.core.events import Finished, Progressed
from outrider.runtime.serving import outbox as outbox_module
from outrider.runtime.serving.outbox import Outbox, Post

from tests.runtime.markov import Harness, spec


@pytest.fixture
async def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """What the running loop is woken up for by other threads, from now on."""
    loop = asyncio.get_running_loop()
    wake, calls = loop.call_soon_threadsafe, []

    def counted(callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        calls.append(callback)
        return wake(callback, *arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return calls


async def test_all_events_of_a_step_arrive_in_one_wake_up(
    wake_ups: list[Callable[..., object]],
) -> None:
    harness, post = Harness("F3"), Post(asyncio.get_running_loop())
    harness.worker.after_step(post.send)
    outboxes = [Outbox(post, 100, lambda: None) for _ in range(3)]
    for number, outbox in enumerate(outboxes):
        harness.worker.submit(spec(str(number), (1,), max_tokens=2, gamma=0), outbox.deliver)
    assert harness.worker.run_step()
    assert len(wake_ups) == 1
    for outbox in outboxes:
        assert [token.token for token in (await outbox.take()).tokens] == [2]
    assert harness.worker.run_step()
    assert len(wake_ups) == 2
    for outbox in outboxes:
        batch = await outbox.take()
        assert [token.token for token in batch.tokens] == [3]
        assert isinstance(batch.end, Finished)
    assert not harness.worker.run_step()
    assert len(wake_ups) == 2


async def test_who_reads_nothing_is_reported_once() -> None:
    post, overflows = Post(asyncio.get_running_loop()), []
    outbox = Outbox(post, 2, lambda: overflows.append(True))
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(post.send)
    harness.worker.submit(spec("a", (1,), max_tokens=6, gamma=0), outbox.deliver)
    for _ in range(6):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]
    batch = await outbox.take()
    assert len(batch.steps) == 6
    assert all(isinstance(step.next_token, int) for step in batch.steps)
    assert outbox.is_ended


async def test_events_for_a_closed_loop_are_dropped() -> None:
    other = asyncio.new_event_loop()
    other.close()
    post = Post(other)
    received: list[Progressed] = []
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(post.send)
    harness.worker.submit(spec("a", max_tokens=2), lambda event: post.put(received.append, event))
    while harness.worker.run_step():
        pass
    assert not received
    harness.check_is_idle()


def streaming(
    interval_s: float, max_tokens: int, max_events: int = 100, step_s: float = 0.0
) -> tuple[Harness, Outbox, list[bool]]:
    """A request whose steps send one token each, its outbox, and what it reports of the reader.

    Steps take ``step_s`` seconds of the outbox's clock.
    """
    post, overflows = Post(asyncio.get_running_loop()), []
    steps = count()
    outbox = Outbox(
        post,
        max_events,
        lambda: overflows.append(True),
        interval_s=interval_s,
        clock=lambda: next(steps) * step_s,
    )
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(post.send)
    harness.worker.submit(spec("a", (1,), max_tokens=max_tokens, gamma=0), outbox.deliver)
    return harness, outbox, overflows


async def test_many_tokens_leave_in_batches_that_a_client_can_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "MOST_TOKENS", 3)
    harness, outbox, overflows = streaming(3600.0, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await outbox.take()).tokens) == 1
    # Kept back until the last one, so that nobody is waiting for a reader.
    for _ in range(8):
        harness.worker.run_step()
    batches = [await outbox.take() for _ in range(3)]
    assert [len(batch.tokens) for batch in batches] == [3, 3, 2]
    assert [len(batch.steps) for batch in batches] == [3, 3, 2]
    assert [batch.end is None for batch in batches] == [True, True, False]
    assert outbox.is_ended and not overflows


async def test_who_reads_less_than_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MOST_TOKENS", 2)
    harness, outbox, overflows = streaming(0.0, max_tokens=40, max_events=4)
    for _ in range(2):
        for _ in range(3):
            harness.worker.run_step()
            await asyncio.sleep(0)
        # One more stays behind each time.
        assert len((await outbox.take()).tokens) == 2
    assert not overflows
    for _ in range(3):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]


async def test_tokens_within_the_interval_travel_together_and_the_end_at_once() -> None:
    # More events wait for the interval to pass than may wait for a reader.
    harness, outbox, overflows = streaming(3600.0, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await outbox.take()).tokens) == 1
    taking = asyncio.ensure_future(outbox.take())
    for _ in range(7):
        harness.worker.run_step()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not taking.done()
    harness.worker.run_step()
    batch = await taking
    assert len(batch.tokens) == 8
    assert isinstance(batch.end, Finished)
    assert not overflows


async def test_tokens_kept_back_leave_when_the_interval_has_passed() -> None:
    harness, outbox, overflows = streaming(0.001, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await outbox.take()).tokens) == 1
    for _ in range(4):
        harness.worker.run_step()
    async with asyncio.timeout(60):
        batch = await outbox.take()
    assert len(batch.tokens) == 4
    assert batch.end is None
    assert not overflows


@pytest.mark.parametrize("step_s", [1799.0, 1801.0])
async def test_tokens_that_follow_one_another_slowly_are_not_kept_back(
    wake_ups: list[Callable[..., object]], step_s: float
) -> None:
    harness, outbox, overflows = streaming(3600.0, max_tokens=9, max_events=2, step_s=step_s)
    is_slow = step_s > 1800.0
    received = []
    for number in range(8):
        harness.worker.run_step()
        if is_slow or number == 0:
            received.append(len((await outbox.take()).tokens))
        assert len(wake_ups) == (number + 1 if is_slow else 1)
    harness.worker.run_step()
    last = await outbox.take()
    assert [*received, len(last.tokens)] == ([1] * 9 if is_slow else [1, 8])
    assert isinstance(last.end, Finished)
    assert not overflows


async def test_events_that_are_kept_back_wake_nobody_up(
    wake_ups: list[Callable[..., object]],
) -> None:
    harness, outbox, _ = streaming(3600.0, max_tokens=9)
    harness.worker.run_step()
    assert len((await outbox.take()).tokens) == 1
    assert len(wake_ups) == 1
    for _ in range(7):
        harness.worker.run_step()
    assert len(wake_ups) == 1
    harness.worker.run_step()
    assert len(wake_ups) == 2
    batch = await outbox.take()
    assert len(batch.tokens) == 8
    assert isinstance(batch.end, Finished)


@pytest.mark.parametrize("point", ["before", "between", "after"])
async def test_an_event_that_meets_the_end_of_its_interval_is_not_left_behind(point: str) -> None:
    """The worker's thread puts one down while the loop's is ending the interval, at every point of it."""
    harness, outbox, _ = streaming(3600.0, max_tokens=9)
    harness.worker.run_step()
    await outbox.take()
    pause = outbox._pause
    assert pause is not None
    pause.cancel()
    collect = outbox._post.collect

    def while_ending() -> None:
        collect()
        outbox._post.collect = collect  # type: ignore[method-assign]
        harness.worker.run_step()

    if point == "before":
        harness.worker.run_step()
    elif point == "between":
        outbox._post.collect = while_ending  # type: ignore[method-assign]
    outbox._end_pause()
    if point == "after":
        harness.worker.run_step()
    async with asyncio.timeout(60):
        assert len((await outbox.take()).tokens) == 1


async def test_intervals_of_all_streams_end_together() -> None:
    ends = set()
    for _ in range(2):
        harness, outbox, _ = streaming(3600.0, max_tokens=9)
        harness.worker.run_step()
        await outbox.take()
        assert outbox._pause is not None
        ends.add(outbox._pause.when())
    assert len(ends) == 1


async def test_who_stops_reading_is_reported_with_an_interval_too() -> None:
    harness, outbox, overflows = streaming(0.001, max_tokens=12, max_events=2)
    harness.worker.run_step()
    await outbox.take()
    harness.worker.run_step()
    async with asyncio.timeout(60):
        await outbox._has_events.wait()
    assert not overflows
    for _ in range(5):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]
