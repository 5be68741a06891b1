"""The orders given to the worker: requests, cancellations, the end.

Runs nothing, knows no thread and no clock; the worker guards it with its lock and asks it, between
two steps, what is to be admitted and what must end. Queueing a group and looking for room take a time that does not
depend on how many are queued: a caller may queue a whole data set. Invariants:

* B1  Nothing is overdue before ``due_at``.
* B2  ``_num_slots`` and ``_num_tokens`` are the sums over the queue.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice

from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import (
    DeadlineExceeded,
    DrainDeadline,
    Draining,
    DuplicateRequestId,
    Overloaded,
    QueueTimeout,
)
from outrider.runtime.core.request import Request
from outrider.runtime.core.scheduler import num_to_admit
from outrider.runtime.loop.slots import SlotAllocator

Group = Sequence[Request]
"""Completions of one prompt, which are admitted together, or a request alone. A queue counts it as one request."""


class Inbox:
    """The bounded queue of groups, and all requests that await a terminal event.

    Args:
        config: bounds of the queue.
        slots: read to tell who waits from who only has to be picked up.

    Attributes:
        due_at: seconds on the worker's clock from which ``take_overdue`` has to be asked. May be read without the lock,
            as may ``has_queued``: what is asked during a step is done before the next or the one after it.
        has_queued: whether a group is queued.
    """

    def __init__(self, config: ServerConfig, slots: SlotAllocator) -> None:
        self._config = config
        self._slots = slots
        self._queue: deque[Group] = deque()
        self._num_slots = self._num_tokens = 0
        self._taken: dict[str, Request] = {}
        # How many requests have the name: those of a group share it.
        self._request_ids: Counter[tuple[str, str]] = Counter()
        self._cancelled: dict[str, Exception] = {}
        self._is_draining = False
        self._stop_at: float | None = None
        self.due_at = math.inf
        self.has_queued = False

    @property
    def is_draining(self) -> bool:
        """Return whether new requests are refused."""
        return self._is_draining

    def queued(self) -> tuple[int, int]:
        """Groups that wait for their slots, and their prompts' tokens together."""
        return len(self._queue), self._num_tokens

    def check_room(self, num_slots: int, num_tokens: int, num_ahead: int = 0) -> None:
        """Refuse a request of so many slots and prompt tokens where ``put`` would, behind so many others yet to come.

        Raises:
            Draining: the server is shutting down.
            Overloaded: the queue is full.
        """
        if self._is_draining:
            raise Draining
        # Free slots that the queue leaves take those ahead of this request first.
        num_left = self._slots.num_free - self._num_slots
        if num_ahead + num_slots <= num_left:
            return  # free slots await it
        num_fitting = self._num_fitting()
        num_waiting = len(self._queue) - num_fitting + max(0, num_ahead - max(0, num_left))
        num_tokens += self._num_tokens
        num_tokens -= sum(map(_num_tokens, islice(self._queue, num_fitting)))
        if num_waiting >= self._config.max_queued or num_tokens > self._config.max_queued_tokens:
            raise Overloaded(self._config.retry_after_s)

    def put(self, group: Group) -> None:
        """Queue a group.

        Raises:
            Draining: the server is shutting down.
            DuplicateRequestId: a request of this name is queued or running.
            Overloaded: the queue is full.
        """
        spec = group[0].spec
        if (spec.tenant, spec.request_id) in self._request_ids or spec.internal_id in self._taken:
            raise DuplicateRequestId
        self.check_room(_num_slots(group), _num_tokens(group))
        self._queue.append(group)
        self._num_slots += _num_slots(group)
        self._num_tokens += _num_tokens(group)
        self.has_queued = True
        self.due_at = min(self.due_at, self._overdue_at(group[0]))
        self._request_ids[spec.tenant, spec.request_id] = len(group)
        for request in group:
            self._taken[request.spec.internal_id] = request

    def cancel(self, internal_id: str, error: Exception) -> None:
        """Have a request end with ``error``; the first one given wins."""
        if internal_id in self._taken:
            self._cancelled.setdefault(internal_id, error)
            self.due_at = -math.inf

    def close(self, stop_at: float | None = None) -> None:
        """Refuse new requests; with a time, end whatever still runs then."""
        self._is_draining = True
        self._stop_at = stop_at if stop_at is not None else self._stop_at
        self.due_at = -math.inf

    def is_queued(self, internal_id: str) -> bool:
        """Return whether a request waits for a slot."""
        request = self._taken.get(internal_id)
        return request is not None and request.slot is None

    def admit(self, admit: Callable[[Group], None]) -> None:
        """Hand over queued groups, oldest first, as long as slots are free; while draining none."""
        for _ in range(self._num_fitting() if self._queue and not self._is_draining else 0):
            group = self._queue.popleft()
            self._num_slots -= _num_slots(group)
            self._num_tokens -= _num_tokens(group)
            admit(group)
        self.has_queued = bool(self._queue)

    def take_overdue(self, now: float) -> list[tuple[Request, Exception]]:
        """Return requests that must end before the next step, and why; they are no longer queued."""
        cancelled, self._cancelled = self._cancelled, {}
        requests = list(self._taken.values())
        endings = [(r, e) for r in requests if (e := self._overdue(r, cancelled, now))]
        ended = {id(request) for request, _ in endings}
        left_of = ([r for r in group if id(r) not in ended] for group in self._queue)
        self._queue = deque(group for group in left_of if group)
        self._num_slots = sum(map(_num_slots, self._queue))
        self._num_tokens = sum(map(_num_tokens, self._queue))
        self.has_queued = bool(self._queue)
        left = [self._overdue_at(request) for request in requests if id(request) not in ended]
        self.due_at = min(left, default=math.inf)
        return endings

    def admitted(self) -> list[Request]:
        """Return everyone no longer queued who awaits a terminal event, with a slot or without."""
        queued = {id(request) for group in self._queue for request in group}
        return [request for request in self._taken.values() if id(request) not in queued]

    def forget(self, request: Request) -> None:
        """A request ended; its name is free again."""
        del self._taken[request.spec.internal_id]
        name = (request.spec.tenant, request.spec.request_id)
        self._request_ids[name] -= 1
        if not self._request_ids[name]:
            del self._request_ids[name]

    @property
    def has_work(self) -> bool:
        """Return whether the worker has something to look at."""
        return bool(self._queue or self._cancelled)

    @property
    def has_waiting(self) -> bool:
        """Return whether requests wait for slots; may be asked without the lock."""
        return bool(self._queue) and not self._is_draining

    @property
    def is_stopping(self) -> bool:
        """Return whether the end has been asked for."""
        return self._stop_at is not None

    def _num_fitting(self) -> int:
        """How many queued groups the free slots are enough for."""
        return num_to_admit(map(_num_slots, self._queue), self._slots.num_free)

    def _overdue_at(self, request: Request) -> float:
        """Return seconds before which only a cancellation can end a request here."""
        times = [request.spec.deadline_s, self._stop_at]
        if request.slot is None:
            times.append(request.submitted_at + self._config.queue_timeout_s)
        return min([time for time in times if time is not None], default=math.inf)

    def _overdue(
        self, request: Request, cancelled: dict[str, Exception], now: float
    ) -> Exception | None:
        spec = request.spec
        is_queued = request.slot is None
        if spec.internal_id in cancelled:
            return cancelled[spec.internal_id]
        if spec.deadline_s is not None and now >= spec.deadline_s:
            return DeadlineExceeded(request.num_output)
        if is_queued and self._is_draining:
            return Draining()
        if is_queued and now - request.submitted_at > self._config.queue_timeout_s:
            return QueueTimeout(now - request.submitted_at)
        if self._stop_at is not None and now >= self._stop_at:
            return DrainDeadline(request.num_output)
        return None


def _num_slots(group: Group) -> int:
    """Return the slots of all completions."""
    return group[0].spec.num_slots * len(group)


def _num_tokens(group: Group) -> int:
    """Return the tokens that the queue counts: the completions have one prompt."""
    return group[0].spec.num_queued_tokens
