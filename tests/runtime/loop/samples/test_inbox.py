"""The queue counts what is in it, and looks no further than it must."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.admission import order
from outrider.runtime.core.config import MOST_COUNT, ServerConfig
from outrider.runtime.core.errors import Cancelled, Overloaded
from outrider.runtime.core.request import Request
from outrider.runtime.loop.inbox import Group, Inbox
from outrider.runtime.loop.slots import SlotAllocator

from tests.runtime.markov import Harness, spec

NUM_SLOTS = 4
WORKER = Harness("F3").worker


def group(name: str, num_samples: int = 1, num_tokens: int = 3) -> Group:
    specs = spec(name, (1,) * num_tokens, num_samples=num_samples).samples()
    return [WORKER._factory.make(one, 0.0) for one in specs]


def full_slots() -> SlotAllocator:
    slots = SlotAllocator(NUM_SLOTS)
    for _ in range(NUM_SLOTS):
        slots.allocate()
    return slots


def queued(inbox: Inbox) -> list[Group]:
    """All groups without slots, in the order in which they get them."""
    return [waiter.item for waiter in (*inbox._granted, *inbox._queue)]


def test_queueing_takes_hardly_longer_behind_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    key_of = order._by_key

    def counting(one: object) -> object:
        seen.append(one)
        return key_of(one)

    monkeypatch.setattr(order, "_by_key", counting)
    config = ServerConfig(max_queued=MOST_COUNT, max_queued_tokens=MOST_COUNT)
    inbox = Inbox(config, full_slots())
    for number in range(200):
        inbox.check_room(1, 3, now=0.0)
        inbox.put(group(str(number)))
        inbox.admit(lambda _: None, 0.0)
        assert inbox.queued() == (number + 1, 3 * (number + 1))
    assert len(seen) < 20 * 200


def test_room_is_what_a_walk_over_the_queue_finds() -> None:
    """Groups of all sizes come, are let in and are cancelled in part, in random order."""
    rng = np.random.default_rng(1)
    slots, config = SlotAllocator(NUM_SLOTS), ServerConfig(max_queued=6, max_queued_tokens=40)
    inbox, live = Inbox(config, slots), list[Request]()
    num_refused = 0

    def admit(one: Group) -> None:
        for request in one:
            request.slot = slots.allocate()
            live.append(request)

    for number in range(600):
        new = group(str(number), int(rng.integers(1, 4)), int(rng.integers(1, 12)))
        queue = queued(inbox)
        num_free = slots.num_free
        num_left = num_free - sum(map(len, queue))
        while queue and len(queue[0]) <= num_free:
            num_free -= len(queue.pop(0))
        tokens = sum(len(one[0].spec.prompt_tokens) for one in [*queue, new])
        is_refused = len(new) > num_left and (len(queue) >= 6 or tokens > 40)
        if is_refused:
            num_refused += 1
            with pytest.raises(Overloaded):
                inbox.put(new)
        else:
            inbox.put(new)
        if rng.random() < 0.4:
            assert inbox.admit(admit, 0.0) == []
        if live and rng.random() < 0.6:
            request = live.pop()
            slots.free(slots.num_live - 1)
            inbox.forget(request)
        if (waiting := [one for each in queued(inbox) for one in each]) and rng.random() < 0.2:
            request = waiting[int(rng.integers(len(waiting)))]
            inbox.cancel(request.spec.internal_id, Cancelled("abort"))
            ((ended, _),) = inbox.take_overdue(0.0)
            assert ended is request
            inbox.forget(ended)
        prompts = [len(one[0].spec.prompt_tokens) for one in queued(inbox)]
        assert inbox.queued() == (len(prompts), sum(prompts))
    assert 50 < num_refused < 550
