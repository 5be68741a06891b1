"""The bounded buffer of one response: filled by the worker's thread, emptied on the event loop.

It merges events instead of blocking, so the worker never waits for a client. A slow reader gets fewer, larger
deltas, none larger than clients take; a client that does not read overflows. A message costs more than a small model's
step, so tokens that follow a message within the interval wait for the next one. Tokens that come slowly do not wait: a
message is cheap beside their step, and waiting would make the text halt.

A wake-up of the loop costs a system call, and takes the interpreter and a processor from the engines' threads. So all
events of a step share one wake-up, events that wait cause none, and the intervals of all streams end together. This
module knows neither gRPC nor the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.runtime.core.events import (
    EmittedToken,
    Event,
    Failed,
    Finished,
    Progressed,
    PromptToken,
    StepTrace,
    pieces_of,
)

MOST_TOKENS = 1024
"""Of one batch, and a step's more: with twenty log-probabilities each, a third of the 4 MiB that clients take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """A piece of a call of a tool, the ``index``-th of its completion; the first piece of each has id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What came since the last take, in order; of more than ``MOST_TOKENS`` the first ones.

    Attributes:
        end: the terminal event, once it has come and nothing is left before it.
        index: of the completion, among those of its prompt.
        prompt: of the first batch, where its log-probabilities were asked for: all of it, or a part.
        reasoning: what stands apart from the text, as the calls do, where the request wants that.
        num_reasoning: tokens that are reasoning.
    """

    tokens: tuple[EmittedToken, ...]
    text: str
    steps: tuple[StepTrace, ...]
    end: Finished | Failed | None
    index: int = 0
    prompt: tuple[PromptToken, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    num_reasoning: int = 0

    def parts(self) -> Iterator[Batch]:
        """Yield batches of at most ``MOST_PROMPT_TOKENS`` of the prompt; the last one has the tokens and all else."""
        *pieces, last = pieces_of(self.prompt)
        for piece in pieces:
            yield Batch(tokens=(), text="", steps=(), end=None, index=self.index, prompt=piece)
        yield replace(self, prompt=last)


class EventDispatcher:
    """Carries events from the worker's thread to the event loop, one wake-up per step."""

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
            event: its argument.
            may_wait: whether ``receive`` will fetch the event with ``collect``. It is called when the event is already
                kept, so that a receiver that stops fetching and then collects once more misses none.
        """
        self._waiting.append((receive, event))
        if not may_wait():
            self._is_urgent = True

    def send(self) -> None:
        """Wake the loop to deliver the kept events, if any is urgent; on the worker's thread."""
        if not self._is_urgent:
            return
        self._is_urgent = False
        # The loop is closed only when the process ends: then no receiver is left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.collect)

    def collect(self) -> None:
        """Deliver the kept events in order; on the loop."""
        while self._waiting:
            receive, event = self._waiting.popleft()
            receive(event)


class Backlog:
    """Counts the events that wait for a reader.

    Args:
        max_events: that may wait.
        on_overflow: called for one more, once.
    """

    __slots__ = ("_has_overflowed", "_max_events", "_num_waiting", "_on_overflow")

    def __init__(self, max_events: int, on_overflow: Callable[[], None]) -> None:
        self._max_events = max_events
        self._on_overflow = on_overflow
        self._num_waiting = 0
        self._has_overflowed = False

    def add(self) -> None:
        """Count one more."""
        self._num_waiting += 1
        if self._num_waiting > self._max_events and not self._has_overflowed:
            self._has_overflowed = True
            self._on_overflow()

    def keep(self, num_left: int) -> None:
        """Note that a reader has left so many events, counted or not."""
        self._num_waiting = min(self._num_waiting, num_left)


class ResponseStream:
    """Events of one request on their way to its stream.

    Args:
        dispatcher: brings the events to the loop.
        max_events: events that may wait for a reader; one more calls ``on_overflow``, once. Events that an interval
            keeps back do not count.
        on_overflow: called on the loop; it should make the worker end the request.
        interval_s: seconds after a ``take`` in which the next one waits, unless the terminal event comes, or an event
            more than half of them after the last. Up to a half more or less, so that all streams' intervals end
            together.
        clock: seconds.
        index: of its batches.
        has_events: set when there is something to take; a group's streams have one in common.
        echo_prefix: text in front of the first event's.

    Attributes:
        num_tokens: tokens that have arrived; of a beam search those that it has made, once it has ended.
    """

    def __init__(
        self,
        dispatcher: EventDispatcher,
        max_events: int,
        on_overflow: Callable[[], None],
        *,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        index: int = 0,
        has_events: asyncio.Event | None = None,
        echo_prefix: str = "",
    ) -> None:
        self._index = index
        self._dispatcher = dispatcher
        self._echo_prefix = echo_prefix
        self._interval_s = interval_s
        self._clock = clock
        # When progress was last delivered; read by the worker's thread alone.
        self._delivered_s = math.inf
        # Set while events are kept back; the worker's thread reads it too.
        self._pause: asyncio.TimerHandle | None = None
        self._keeps_back = False
        self._backlog = Backlog(max_events, on_overflow)
        self._progress: deque[Progressed] = deque()
        self._end: Finished | Failed | None = None
        self._is_cut = False
        self._when_over: Callable[[], None] | None = None
        self.num_tokens = 0
        self._has_events = has_events or asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """True once the worker's terminal event has arrived."""
        return self._end is not None and not self._is_cut

    def cut(self, error: Exception) -> None:
        """End the stream with an error in place of a worker that does not; on the loop."""
        if self._end is None:
            self._put_at_once(Failed(error=error, num_output=self.num_tokens))
            self._is_cut = True

    def when_over(self, call: Callable[[], None]) -> None:
        """Call something once no token can come any more: after the terminal event, or a cut."""
        if self._end is not None:
            call()
        else:
            self._when_over = call

    def deliver(self, event: Event) -> None:
        """Add an event on the worker's thread; it arrives when the dispatcher is sent, or the interval ends."""
        if not isinstance(event, Progressed):
            self._dispatcher.put(self._put_at_once, event)
            return
        now_s = self._clock()
        is_late = now_s - self._delivered_s > self._interval_s / 2
        self._delivered_s = now_s
        if is_late:
            self._dispatcher.put(self._put_at_once, event)
        else:
            self._dispatcher.put(self._put, event, may_wait=lambda: self._pause is not None)

    async def take(self) -> Batch:
        """Wait for events and return them as one batch."""
        await self._has_events.wait()
        self._has_events.clear()
        return self.taken()

    @property
    def has_batch(self) -> bool:
        """True if events are waiting that nothing keeps back."""
        return self._end is not None or (bool(self._progress) and not self._keeps_back)

    def taken(self) -> Batch:
        """Return the events that are here as one batch."""
        progress: list[Progressed] = []
        num_tokens = 0
        while self._progress and num_tokens < MOST_TOKENS:
            progress.append(self._progress.popleft())
            num_tokens += len(progress[-1].tokens)
        # Those that an interval kept back were never counted.
        self._backlog.keep(len(self._progress))
        end = None if self._progress else self._end
        if self._progress:
            self._has_events.set()
        elif self._interval_s > 0.0 and end is None:
            loop = asyncio.get_running_loop()
            tick = round(loop.time() / self._interval_s) + 1
            self._keeps_back = True
            self._pause = loop.call_at(tick * self._interval_s, self._end_pause)
        echo_prefix, self._echo_prefix = self._echo_prefix, ""
        return Batch(
            tokens=tuple(token for event in progress for token in event.tokens),
            text=echo_prefix + "".join(event.text for event in progress),
            steps=tuple(event.trace for event in progress),
            end=end,
            index=self._index,
            prompt=progress[0].prompt if progress else (),
        )

    def _put(self, event: Event) -> None:
        if self._is_cut:
            return
        if isinstance(event, Progressed):
            self._progress.append(event)
            self.num_tokens += len(event.tokens)
            if not self._keeps_back:
                self._has_events.set()
                self._backlog.add()
        else:
            self._end = event
            self.num_tokens = max(self.num_tokens, event.num_output)
            self._has_events.set()
            if self._when_over is not None:
                self._when_over()

    def _put_at_once(self, event: Event) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._keeps_back = False
        self._put(event)

    def _end_pause(self) -> None:
        self._pause = None
        self._dispatcher.collect()
        self._keeps_back = False
        if self._progress:
            self._has_events.set()


class GroupResponseStream:
    """The streams of a group, read as one: batches of its completions in turn, until each has had its end.

    Args:
        streams: one per completion, with ``has_events``.
        has_events: set when any of them has something to take.
    """

    def __init__(self, streams: Sequence[ResponseStream], has_events: asyncio.Event) -> None:
        self._all = streams
        self._open = deque(streams)
        self._has_events = has_events

    @property
    def is_ended(self) -> bool:
        """True once the worker's terminal events of all have arrived."""
        return all(one.is_ended for one in self._all)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that have arrived."""
        return sum(one.num_tokens for one in self._all)

    def cut(self, error: Exception) -> None:
        """End the stream with an error in place of a worker that does not; on the loop."""
        for one in self._all:
            one.cut(error)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call something once no token of any completion can come any more."""
        num_open = len(self._all)

        def count() -> None:
            nonlocal num_open
            num_open -= 1
            if not num_open:
                call()

        for one in self._all:
            one.when_over(count)

    async def take(self) -> Batch:
        """Wait for events of any completion and return what has come of it as one batch."""
        while True:
            for _ in range(len(self._open)):
                stream = self._open.popleft()
                if not stream.has_batch:
                    self._open.append(stream)
                    continue
                batch = stream.taken()
                if batch.end is None:
                    self._open.append(stream)
                return batch
            await self._has_events.wait()
            self._has_events.clear()
