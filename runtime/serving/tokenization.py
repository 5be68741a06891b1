"""Texts on their way to token ids: one long text at a time, and the others wait in a fair order.

A tokenizer takes .4 s of a processor for a text of 1 MiB, and must take them from neither the event loop nor, beside
many such texts, the engines. So short texts are tokenised at once and long ones one after another, on a thread of their
own; short chats on another, since templates take their time. A text's turn comes when as many bytes have been tokenised
since it came as it has itself. So a short text passes the long ones, and they are passed by no more than their size.

Long prompts count against the queue that their requests have yet to reach (``prompts_of``). All texts, those of calls
that reach no queue too, have bounds of the same size here. As much again is kept for tenants that have no text here: no
tenant's texts keep another's out.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from outrider.runtime.core.errors import Overloaded

# Texts shorter than this are tokenised on the event loop: a thread costs more than they do.
INLINE_TEXT = 4096
# Of usual texts. A text counts by it until its tokens are known.
BYTES_PER_TOKEN = 4

T = TypeVar("T")


@dataclass(slots=True, order=True)
class _Job:
    """Work on one text, in the order of turns.

    Attributes:
        turn_at: bytes tokenised in all at which its turn comes, whoever else waits.
        number: breaks ties by arrival.
    """

    turn_at: int
    number: int
    tenant: str = field(compare=False)
    size: int = field(compare=False)
    is_prompt: bool = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    answer: asyncio.Future[Any] = field(compare=False)


class Turns:
    """Lets one piece of work begin in each turn of the event loop, in order of arrival.

    A turn runs all that is ready, and timers and messages wait for its end: of 256 requests at once 2 s.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._is_taken = False

    async def take(self) -> None:
        """Return when a turn is free; at once where the present one is."""
        async with self._lock:
            if self._is_taken:
                await asyncio.sleep(0)
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        self._is_taken = False


class TokenizationQueue:
    """Runs work on texts, long ones one at a time; used on the event loop alone.

    Args:
        max_queued: long texts that may wait.
        max_queued_tokens: tokens of the long texts that are here together, as estimated by their size.
        retry_after_s: seconds a refused caller is told to wait.
    """

    def __init__(self, *, max_queued: int, max_queued_tokens: int, retry_after_s: float) -> None:
        self._max_queued = max_queued
        self._max_bytes = BYTES_PER_TOKEN * max_queued_tokens
        self._retry_after_s = retry_after_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-texts")
        self._waiting: list[_Job] = []  # a heap
        self._numbers = itertools.count()
        self._is_busy = False
        self._jobs: dict[int, _Job] = {}  # all that are here, by number
        self._num_bytes = 0
        self._num_texts_of: Counter[str] = Counter()  # by tenant
        self._num_done_bytes = 0

    def prompts_of(self, tenant: str) -> tuple[int, int]:
        """Return the number of a tenant's long prompts that are here, and their tokens as estimated by their size."""
        if tenant not in self._num_texts_of:
            return 0, 0
        sizes = [job.size for job in self._jobs.values() if job.is_prompt and job.tenant == tenant]
        return len(sizes), sum(sizes) // BYTES_PER_TOKEN

    def run(
        self, text: str, work: Callable[[], T], *, tenant: str = "", is_prompt: bool = False
    ) -> Awaitable[T]:
        """Return what ``work`` on a text returns, as ``run_sized`` does."""
        return self.run_sized(len(text.encode()), work, tenant=tenant, is_prompt=is_prompt)

    async def run_sized(
        self,
        size: int,
        work: Callable[[], T],
        *,
        tenant: str = "",
        is_prompt: bool = False,
        may_be_inline: bool = True,
    ) -> T:
        """Return what ``work`` returns, in its turn.

        A caller that is cancelled leaves its place. Work that has begun goes on; nothing else begins before its end.

        Args:
            size: bytes of a text on which the work takes about the time of tokenising it.
            work: takes no arguments; runs on the event loop where it is short.
            tenant: whose text it is.
            is_prompt: whether the text is a prompt.
            may_be_inline: whether short work is as quick as tokenising.

        Raises:
            Overloaded: too many texts wait, or too long ones.
        """
        if size < INLINE_TEXT and may_be_inline:
            return work()
        self._check_room(tenant, size)
        answer = asyncio.get_running_loop().create_future()
        turn_at, number = self._num_done_bytes + size, next(self._numbers)
        job = _Job(turn_at, number, tenant, size, is_prompt, work, answer)
        heapq.heappush(self._waiting, job)
        self._jobs[number] = job
        self._num_bytes += size
        self._num_texts_of[tenant] += 1
        self._start_next()
        try:
            return cast("T", await answer)
        finally:
            del self._jobs[number]
            self._num_bytes -= size
            self._num_texts_of[tenant] -= 1
            if not self._num_texts_of[tenant]:
                del self._num_texts_of[tenant]
            if job in self._waiting:  # cancelled
                self._waiting.remove(job)
                heapq.heapify(self._waiting)

    def _check_room(self, tenant: str, size: int) -> None:
        share = 1 if tenant in self._num_texts_of else 2
        num_texts, num_bytes = len(self._jobs), self._num_bytes + size
        is_full = num_texts > share * self._max_queued or num_bytes > share * self._max_bytes
        # Whatever the bounds, one text is always taken.
        if num_texts and is_full:
            raise Overloaded(self._retry_after_s)

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        job, loop = heapq.heappop(self._waiting), asyncio.get_running_loop()

        def tell(done: Future[Any]) -> None:
            # The loop is closed only when the process ends: then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, job, done)

        self._thread.submit(job.work).add_done_callback(tell)

    def _finish(self, job: _Job, done: Future[Any]) -> None:
        self._is_busy = False
        self._num_done_bytes += job.size
        if not job.answer.done():
            if error := done.exception():
                job.answer.set_exception(error)
            else:
                job.answer.set_result(done.result())
        self._start_next()
