"""The orders given to the worker: requests, cancellations, the end.

Runs nothing, knows no thread and no clock; the worker guards it with its lock and asks it, between
two steps, what is to be admitted and what must end. Whose turn it is says ``runtime.admission.order``. Queueing a group
and looking for room take a time that hardly depends on how many are queued: a caller may queue a whole data set.
Invariants:

* B1  Nothing is overdue before ``due_at``.
* B2  ``_num_granted`` is the number of slots of ``_granted``: groups whose turn has come, and whose slots are free but
  not theirs before the next step begins. Who has come since cannot overtake them.
* B3  ``_holders`` are those of granted groups that await a terminal event; the queue counts what their tenants hold.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence

from outrider.runtime.admission.forecast import Forecast
from outrider.runtime.admission.order import Queue, Waiter
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DrainDeadline,
    Draining,
    DuplicateRequestId,
    Overloaded,
    QueueTimeout,
    QuotaExceeded,
    RequestError,
)
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.request import Request
from outrider.runtime.core.tenant import ANY_CLAIM, Claim
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
        forecast: of first tokens; the worker tells it what steps took.
    """

    def __init__(self, config: ServerConfig, slots: SlotAllocator) -> None:
        self._config = config
        self._slots = slots
        self._queue: Queue[Group] = Queue()
        self._granted: deque[Waiter[Group]] = deque()
        self._num_granted = 0
        self._holders: dict[str, Request] = {}
        self._taken: dict[str, Request] = {}
        # How many requests have the name: those of a group share it.
        self._request_ids: Counter[tuple[str, str]] = Counter()
        self._cancelled: dict[str, Exception] = {}
        self._is_draining = False
        self._stop_at: float | None = None
        self.due_at = math.inf
        self.has_queued = False
        self.forecast = Forecast(config.prefill_chunk)

    @property
    def is_draining(self) -> bool:
        """Return whether new requests are refused."""
        return self._is_draining

    def queued(self) -> tuple[int, int]:
        """Groups that wait for their slots, and their prompts' tokens together."""
        num_tokens = self._queue.num_tokens + sum(one.num_tokens for one in self._granted)
        return len(self._queue) + len(self._granted), num_tokens

    def check_room(
        self,
        num_slots: int,
        num_tokens: int,
        num_ahead: int = 0,
        *,
        claim: Claim = ANY_CLAIM,
        now: float,
    ) -> None:
        """Refuse a request of so many slots and prompt tokens where ``put`` would, behind so many others yet to come.

        Raises:
            Draining: the server is shutting down.
            DeadlineUnreachable: the request would be answered too late.
            QuotaExceeded: too many requests of the tenant wait.
            Overloaded: the queue is full.
        """
        if self._is_draining:
            raise Draining
        self._grant(now)
        # Free slots that the queue leaves take those ahead of this request first.
        num_left = self._num_left
        if num_ahead + num_slots > num_left or self._queue.must_wait(claim, num_slots):
            num_waiting = len(self._queue) + max(0, num_ahead - max(0, num_left))
            self._check_queue(num_waiting, num_tokens, claim)
            ahead = self._queue.ahead(claim, now)
        else:
            ahead = 0.0, 0.0  # free slots await it
        if self._is_hopeless(claim, num_slots, num_tokens, now, ahead):
            raise DeadlineUnreachable

    def _check_queue(self, num_waiting: int, num_tokens: int, claim: Claim) -> None:
        """Refuse a request that would wait behind so many others."""
        most = claim.rules.max_queued
        if most is not None and self._queue.num_waiting(claim.tenant) >= most:
            raise QuotaExceeded("max_queued", self._config.retry_after_s)
        num_tokens += self._queue.num_tokens
        if not self._is_full(num_waiting, num_tokens):
            return
        crowder = self._queue.crowder(claim)
        if crowder is None or self._is_full(num_waiting - 1, num_tokens - crowder.num_tokens):
            raise Overloaded(self._config.retry_after_s)

    def _is_full(self, num_waiting: int, num_tokens: int) -> bool:
        """Return whether nobody may wait behind so many, with so many tokens together."""
        config = self._config
        return num_waiting >= config.max_queued or num_tokens > config.max_queued_tokens

    def _make_room(self, claim: Claim, num_tokens: int) -> None:
        """Have the one make room who must for a request that ``check_room`` did not refuse, if anybody."""
        if self._is_full(len(self._queue), self._queue.num_tokens + num_tokens):
            crowder = self._queue.crowder(claim)
            if crowder is not None:
                self._queue.remove(crowder)
                for request in crowder.item:
                    error = Overloaded(self._config.retry_after_s)
                    self.cancel(request.spec.internal_id, error)

    def put(self, group: Group) -> None:
        """Queue a group, since its ``submitted_at``.

        Raises:
            RequestError: it needs more slots than its tenant may hold.
            Draining: the server is shutting down.
            DuplicateRequestId: a request of this name is queued or running.
            DeadlineUnreachable: it would be answered too late.
            QuotaExceeded: too many requests of the tenant wait.
            Overloaded: the queue is full.
        """
        spec, now = group[0].spec, group[0].timestamps.submitted_at
        claim, num_slots, num_tokens = spec.claim, _num_slots(group), spec.num_queued_tokens
        most = claim.rules.max_slots
        if most is not None and num_slots > most:
            field = "n" if spec.beams is None else "num_beams"
            raise RequestError(field, f"must be at most {most}, the slots that the tenant may hold")
        if (spec.tenant, spec.request_id) in self._request_ids or spec.internal_id in self._taken:
            raise DuplicateRequestId
        self.check_room(num_slots, num_tokens, claim=claim, now=now)
        if num_slots > self._num_left or self._queue.must_wait(claim, num_slots):
            self._make_room(claim, num_tokens)
        self._queue.add(group, claim, num_slots=num_slots, num_tokens=num_tokens, now=now)
        self.has_queued = True
        self.due_at = min(self.due_at, self._overdue_at(group[0]))
        self._request_ids[spec.tenant, spec.request_id] = len(group)
        for request in group:
            self._taken[request.spec.internal_id] = request
        self._grant(now)

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
        return request is not None and request.state is State.QUEUED

    def admit(self, admit: Callable[[Group], None], now: float) -> list[Request]:
        """Hand over queued groups in turn as long as slots are free; while draining none.

        Returns:
            Requests whose deadlines are too near, to end with ``DeadlineUnreachable``; no longer queued.
        """
        hopeless: list[Request] = []
        if not self._is_draining:
            self._grant(now)
            while self._granted:
                waiter = self._granted.popleft()
                self._num_granted -= waiter.num_slots
                if self._is_hopeless(waiter.claim, 0, waiter.num_tokens, now):
                    hopeless += waiter.item
                else:
                    admit(waiter.item)
        self.has_queued = bool(self._queue or self._granted)
        return hopeless

    def take_overdue(self, now: float) -> list[tuple[Request, Exception]]:
        """Return requests that must end before the next step, and why; they are no longer queued."""
        cancelled, self._cancelled = self._cancelled, {}
        requests = list(self._taken.values())
        endings = [(r, e) for r in requests if (e := self._overdue(r, cancelled, now))]
        ended = {id(request) for request, _ in endings}
        self._unqueue(ended)
        self.has_queued = bool(self._queue or self._granted)
        left = [self._overdue_at(request) for request in requests if id(request) not in ended]
        self.due_at = min(left, default=math.inf)
        return endings

    def admitted(self) -> list[Request]:
        """Return everyone no longer queued who awaits a terminal event, with a slot or without."""
        granted = {id(request) for waiter in self._granted for request in waiter.item}
        return [request for request in self._holders.values() if id(request) not in granted]

    def forget(self, request: Request) -> None:
        """A request ended; its name is free again."""
        internal_id = request.spec.internal_id
        del self._taken[internal_id]
        if self._holders.pop(internal_id, None) is not None:
            self._queue.release(request.spec.tenant, request.spec.num_slots)
        name = (request.spec.tenant, request.spec.request_id)
        self._request_ids[name] -= 1
        if not self._request_ids[name]:
            del self._request_ids[name]

    @property
    def has_work(self) -> bool:
        """Return whether the worker has something to look at."""
        return bool(self._queue or self._granted or self._cancelled)

    @property
    def has_waiting(self) -> bool:
        """Return whether requests wait for slots; may be asked without the lock."""
        return bool(self._queue or self._granted) and not self._is_draining

    @property
    def is_stopping(self) -> bool:
        """Return whether the end has been asked for."""
        return self._stop_at is not None

    @property
    def _num_left(self) -> int:
        """Free slots that are nobody's yet."""
        return self._slots.num_free - self._num_granted

    def _grant(self, now: float) -> None:
        """Have those whose turn has come wait for nothing but the next step."""
        for waiter in self._queue.take(self._num_left, now):
            self._granted.append(waiter)
            self._num_granted += waiter.num_slots
            self._holders |= {request.spec.internal_id: request for request in waiter.item}
            if waiter.item[0].timestamps.submitted_at < now:
                self.forecast.granted(waiter.num_slots, now)
        if not self._queue:
            self.forecast.nobody_waits()

    def _is_hopeless(
        self,
        claim: Claim,
        num_slots: int,
        num_tokens: int,
        now: float,
        ahead: tuple[float, float] = (0.0, 0.0),
    ) -> bool:
        """Return whether a deadline passes before the first token, with so many slots and tokens waiting ahead."""
        if claim.deadline_s == math.inf:
            return False
        has_slot = [one for one in self._holders.values() if one.slot is not None]
        needed_s = self.forecast.first_token_s(
            num_ahead=ahead[1] + sum(map(num_unfed, has_slot)),
            num_tokens=num_tokens,
            num_missing=ahead[0] + num_slots - self._num_left,
        )
        return now + needed_s >= claim.deadline_s

    def _unqueue(self, ended: Container[int]) -> None:
        """Have requests of these identities wait no longer."""
        for waiter in [*self._queue, *self._granted]:
            left = [request for request in waiter.item if id(request) not in ended]
            if len(left) == len(waiter.item):
                continue
            num_slots = _num_slots(left) if left else 0
            if waiter in self._granted:
                self._num_granted -= waiter.num_slots - num_slots
                waiter.item, waiter.num_slots = left, num_slots
            elif left:
                self._queue.shrink(waiter, left, num_slots)
            else:
                self._queue.remove(waiter)
        self._granted = deque(waiter for waiter in self._granted if waiter.item)

    def _overdue_at(self, request: Request) -> float:
        """Return seconds before which only a cancellation can end a request here."""
        times = [request.spec.deadline_s, self._stop_at]
        if request.state is State.QUEUED:
            times.append(request.timestamps.submitted_at + self._config.queue_timeout_s)
        return min([time for time in times if time is not None], default=math.inf)

    def _overdue(
        self, request: Request, cancelled: dict[str, Exception], now: float
    ) -> Exception | None:
        spec = request.spec
        is_queued = request.state is State.QUEUED
        if spec.internal_id in cancelled:
            return cancelled[spec.internal_id]
        if spec.deadline_s is not None and now >= spec.deadline_s:
            return DeadlineExceeded(request.sequence.num_output)
        if is_queued and self._is_draining:
            return Draining()
        if is_queued and now - request.timestamps.submitted_at > self._config.queue_timeout_s:
            return QueueTimeout(now - request.timestamps.submitted_at)
        if self._stop_at is not None and now >= self._stop_at:
            return DrainDeadline(request.sequence.num_output)
        return None


def _num_slots(group: Group) -> int:
    """Return the slots of all completions."""
    return group[0].spec.num_slots * len(group)


def num_unfed(request: Request) -> int:
    """Return the tokens of a request's source and prompt that the target has yet to be fed for it."""
    is_reading = request.state in (State.QUEUED, State.READING, State.PREFILLING)
    # Of a beam search it shows only at the end how far it is; of those that wait for a leader there is nothing to feed.
    if not is_reading or request.group.leader is not None or request.spec.beams is not None:
        return 0
    cache = request.cache
    return cache.num_unread + max(0, request.sequence.num_prompt - cache.num_computed)
