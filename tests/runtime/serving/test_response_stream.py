"""Events of a step reach the event loop together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from outrider.runtime.core.events import Finished, Progressed
from outrider.runtime.serving import response_stream as response_stream
from outrider.runtime.serving.response_stream import EventDispatcher, ResponseStream

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
    harness, dispatcher = Harness("F3"), EventDispatcher(asyncio.get_running_loop())
    harness.worker.after_step(dispatcher.send)
    streams = [ResponseStream(dispatcher, 100, lambda: None) for _ in range(3)]
    for number, stream in enumerate(streams):
        harness.worker.submit(spec(str(number), (1,), max_tokens=2, gamma=0), stream.deliver)
    assert harness.worker.run_step()
    assert len(wake_ups) == 1
    for stream in streams:
        assert [token.token for token in (await stream.take()).tokens] == [2]
    assert harness.worker.run_step()
    assert len(wake_ups) == 2
    for stream in streams:
        batch = await stream.take()
        assert [token.token for token in batch.tokens] == [3]
        assert isinstance(batch.end, Finished)
    assert not harness.worker.run_step()
    assert len(wake_ups) == 2


async def test_who_reads_nothing_is_reported_once() -> None:
    dispatcher, overflows = EventDispatcher(asyncio.get_running_loop()), []
    stream = ResponseStream(dispatcher, 2, lambda: overflows.append(True))
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(dispatcher.send)
    harness.worker.submit(spec("a", (1,), max_tokens=6, gamma=0), stream.deliver)
    for _ in range(6):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]
    batch = await stream.take()
    assert len(batch.steps) == 6
    assert all(isinstance(step.next_token, int) for step in batch.steps)
    assert stream.is_ended


async def test_events_for_a_closed_loop_are_dropped() -> None:
    other = asyncio.new_event_loop()
    other.close()
    dispatcher = EventDispatcher(other)
    received: list[Progressed] = []
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(dispatcher.send)
    harness.worker.submit(
        spec("a", max_tokens=2), lambda event: dispatcher.put(received.append, event)
    )
    while harness.worker.run_step():
        pass
    assert not received
    harness.check_is_idle()


def streaming(
    interval_s: float, max_tokens: int, max_events: int = 100, step_s: float = 0.0
) -> tuple[Harness, ResponseStream, list[bool]]:
    """A request whose steps send one token each, its stream, and what it reports of the reader.

    Steps take ``step_s`` seconds of the stream's clock.
    """
    dispatcher, overflows = EventDispatcher(asyncio.get_running_loop()), []
    steps = count()
    stream = ResponseStream(
        dispatcher,
        max_events,
        lambda: overflows.append(True),
        interval_s=interval_s,
        clock=lambda: next(steps) * step_s,
    )
    harness = Harness("F3", message_interval_s=0.0)
    harness.worker.after_step(dispatcher.send)
    harness.worker.submit(spec("a", (1,), max_tokens=max_tokens, gamma=0), stream.deliver)
    return harness, stream, overflows


async def test_many_tokens_leave_in_batches_that_a_client_can_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_stream, "MOST_TOKENS", 3)
    harness, stream, overflows = streaming(3600.0, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await stream.take()).tokens) == 1
    # Kept back until the last one, so that nobody is waiting for a reader.
    for _ in range(8):
        harness.worker.run_step()
    batches = [await stream.take() for _ in range(3)]
    assert [len(batch.tokens) for batch in batches] == [3, 3, 2]
    assert [len(batch.steps) for batch in batches] == [3, 3, 2]
    assert [batch.end is None for batch in batches] == [True, True, False]
    assert stream.is_ended and not overflows


async def test_who_reads_less_than_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_stream, "MOST_TOKENS", 2)
    harness, stream, overflows = streaming(0.0, max_tokens=40, max_events=4)
    for _ in range(2):
        for _ in range(3):
            harness.worker.run_step()
            await asyncio.sleep(0)
        # One more stays behind each time.
        assert len((await stream.take()).tokens) == 2
    assert not overflows
    for _ in range(3):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]


async def test_tokens_within_the_interval_travel_together_and_the_end_at_once() -> None:
    # More events wait for the interval to pass than may wait for a reader.
    harness, stream, overflows = streaming(3600.0, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await stream.take()).tokens) == 1
    taking = asyncio.ensure_future(stream.take())
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
    harness, stream, overflows = streaming(0.001, max_tokens=9, max_events=2)
    harness.worker.run_step()
    assert len((await stream.take()).tokens) == 1
    for _ in range(4):
        harness.worker.run_step()
    async with asyncio.timeout(60):
        batch = await stream.take()
    assert len(batch.tokens) == 4
    assert batch.end is None
    assert not overflows


@pytest.mark.parametrize("step_s", [1799.0, 1801.0])
async def test_tokens_that_follow_one_another_slowly_are_not_kept_back(
    wake_ups: list[Callable[..., object]], step_s: float
) -> None:
    harness, stream, overflows = streaming(3600.0, max_tokens=9, max_events=2, step_s=step_s)
    is_slow = step_s > 1800.0
    received = []
    for number in range(8):
        harness.worker.run_step()
        if is_slow or number == 0:
            received.append(len((await stream.take()).tokens))
        assert len(wake_ups) == (number + 1 if is_slow else 1)
    harness.worker.run_step()
    last = await stream.take()
    assert [*received, len(last.tokens)] == ([1] * 9 if is_slow else [1, 8])
    assert isinstance(last.end, Finished)
    assert not overflows


async def test_events_that_are_kept_back_wake_nobody_up(
    wake_ups: list[Callable[..., object]],
) -> None:
    harness, stream, _ = streaming(3600.0, max_tokens=9)
    harness.worker.run_step()
    assert len((await stream.take()).tokens) == 1
    assert len(wake_ups) == 1
    for _ in range(7):
        harness.worker.run_step()
    assert len(wake_ups) == 1
    harness.worker.run_step()
    assert len(wake_ups) == 2
    batch = await stream.take()
    assert len(batch.tokens) == 8
    assert isinstance(batch.end, Finished)


@pytest.mark.parametrize("point", ["before", "between", "after"])
async def test_an_event_that_meets_the_end_of_its_interval_is_not_left_behind(point: str) -> None:
    """The worker's thread puts one down while the loop's is ending the interval, at every point of it."""
    harness, stream, _ = streaming(3600.0, max_tokens=9)
    harness.worker.run_step()
    await stream.take()
    pause = stream._pause
    assert pause is not None
    pause.cancel()
    collect = stream._dispatcher.collect

    def while_ending() -> None:
        collect()
        stream._dispatcher.collect = collect  # type: ignore[method-assign]
        harness.worker.run_step()

    if point == "before":
        harness.worker.run_step()
    elif point == "between":
        stream._dispatcher.collect = while_ending  # type: ignore[method-assign]
    stream._end_pause()
    if point == "after":
        harness.worker.run_step()
    async with asyncio.timeout(60):
        assert len((await stream.take()).tokens) == 1


async def test_intervals_of_all_streams_end_together() -> None:
    ends = set()
    for _ in range(2):
        harness, stream, _ = streaming(3600.0, max_tokens=9)
        harness.worker.run_step()
        await stream.take()
        assert stream._pause is not None
        ends.add(stream._pause.when())
    assert len(ends) == 1


async def test_who_stops_reading_is_reported_with_an_interval_too() -> None:
    harness, stream, overflows = streaming(0.001, max_tokens=12, max_events=2)
    harness.worker.run_step()
    await stream.take()
    harness.worker.run_step()
    async with asyncio.timeout(60):
        await stream._has_events.wait()
    assert not overflows
    for _ in range(5):
        harness.worker.run_step()
        await asyncio.sleep(0)
    assert overflows == [True]
