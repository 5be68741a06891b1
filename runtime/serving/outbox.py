"""The bounded outbox of one stream: filled by the worker's thread, emptied on the event loop.

It coalesces instead of blocking, so the worker never waits for a client: who reads slowly gets
fewer, larger deltas, who does not read at all is reported as overflowing. A message costs more than
the step of a small model takes, so tokens that follow a message within the interval are kept for
the next. Tokens that follow one another slowly are not: a message is cheap beside such a step, and
waiting would make the text halt.

A wake-up of the loop costs a system call, and takes interpreter and processor from the engines'
threads. So all events of one step share one, events that are kept back anyway cause none, and the
intervals of all streams end together. Knows neither gRPC nor the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outrider.runtime.core.params import (
    EmittedToken,
    Event,
    Failed,
    Finished,
    Progressed,
    StepTrace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All that became ready since the last take, in order.

    Attributes:
        end: the terminal event, if it was among them.
    """

    tokens: tuple[EmittedToken, ...]
    text: str
    steps: tuple[StepTrace, ...]
    end: Finished | Failed | None


class Post:
    """Carries events from the worker's thread to the event loop, a step's worth at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Filled on the worker's thread, emptied on the loop's: neither end of a deque needs a lock.
        self._waiting: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._is_urgent = False

    def put(
        self,
        receive: Callable[[Event], None],
        event: Event,
        *,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep an event for ``receive``, on the worker's thread.

        Args:
            receive: called on the loop.
            event: what it is told.
            may_wait: whether ``receive`` will fetch it with ``collect``. Asked once the event lies
                here, so that who stops fetching and then looks once more misses none.
        """
        self._waiting.append((receive, event))
        if not may_wait():
            self._is_urgent = True

    def send(self) -> None:
        """Have the loop hand out what is kept, in order, if any of it is urgent; on the worker's thread."""
        if not self._is_urgent:
            return
        self._is_urgent = False
        # The loop is closed only when the process is going away: nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.collect)

    def collect(self) -> None:
        """Hand out what is kept, in order; on the loop."""
        while self._waiting:
            receive, event = self._waiting.popleft()
            receive(event)


class Outbox:
    """Events of one request on their way to its stream.

    Args:
        post: brings the events to the loop.
        max_events: events that may wait for a reader; one more calls ``on_overflow``, once. Those of
            an interval are kept back from the reader, and do not count.
        on_overflow: called on the loop; expected to make the worker end the request.
        interval_s: seconds from one ``take`` during which only the terminal event ends another, or one
            that comes more than half of them after the event before it; up to a half more or less, so
            that the intervals of all outboxes end together.
        clock: seconds.
    """

    def __init__(
        self,
        post: Post,
        max_events: int,
        on_overflow: Callable[[], None],
        *,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._interval_s = interval_s
        self._clock = clock
        self._delivered_s = (
            math.inf
        )  # when progress was last delivered; the worker's thread alone asks
        # Set while events are kept back; the worker's thread asks too.
        self._pause: asyncio.TimerHandle | None = None
        self._keeps_back = False
        self._max_events = max_events
        self._on_overflow = on_overflow
        self._progress: list[Progressed] = []
        self._num_waiting = 0
        self._end: Finished | Failed | None = None
        self._has_events = asyncio.Event()
        self._has_overflowed = False

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event has arrived."""
        return self._end is not None

    def deliver(self, event: Event) -> None:
        """Hand over an event on the worker's thread; it arrives once the post is sent, or the interval ends."""
        if not isinstance(event, Progressed):
            self._post.put(self._put_at_once, event)
            return
        now_s = self._clock()
        is_late = now_s - self._delivered_s > self._interval_s / 2
        self._delivered_s = now_s
        if is_late:
            self._post.put(self._put_at_once, event)
        else:
            self._post.put(self._put, event, may_wait=lambda: self._pause is not None)

    async def take(self) -> Batch:
        """Wait for events and return all there are as one batch."""
        await self._has_events.wait()
        self._has_events.clear()
        if self._interval_s > 0.0 and not self.is_ended:
            loop = asyncio.get_running_loop()
            tick = round(loop.time() / self._interval_s) + 1
            self._keeps_back = True
            self._pause = loop.call_at(tick * self._interval_s, self._end_pause)
        progress, self._progress = self._progress, []
        self._num_waiting = 0
        return Batch(
            tokens=tuple(token for event in progress for token in event.tokens),
            text="".join(event.text for event in progress),
            steps=tuple(event.trace for event in progress),
            end=self._end,
        )

    def _put(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self._progress.append(event)
            if not self._keeps_back:
                self._has_events.set()
                self._count_waiting()
        else:
            self._end = event
            self._has_events.set()

    def _put_at_once(self, event: Event) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._keeps_back = False
        self._put(event)

    def _end_pause(self) -> None:
        self._pause = None
        self._post.collect()
        self._keeps_back = False
        if self._progress:
            self._has_events.set()

    def _count_waiting(self) -> None:
        self._num_waiting += 1
        if self._num_waiting > self._max_events and not self._has_overflowed:
            self._has_overflowed = True
            self._on_overflow()
