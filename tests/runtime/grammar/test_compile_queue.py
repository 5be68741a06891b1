"""Grammars are tried by turns of tenants: nobody's crowd keeps another's out, and what is known waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from outrider.runtime.core.errors import Overloaded, RequestError
from outrider.runtime.core.params import GrammarParams
from outrider.runtime.grammar import compile_queue
from outrider.runtime.grammar.compile import GrammarCompiler
from outrider.runtime.grammar.compile_queue import (
    MOST_OF_TENANT,
    MOST_WAITING,
    GrammarCompileQueue,
)

from tests.mutants import put_in
from tests.runtime.grammar.letters import END, V, regex, tokenizer


class Gated(GrammarCompiler):
    """Tries one grammar at each step that the test lets it take, and notes the order."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), V, (END,))
        self.order: list[str] = []
        self._gate = threading.Semaphore(0)

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._gate.release()

    def _try(self, params: GrammarParams) -> str:
        assert self._gate.acquire(timeout=60)
        self.order.append(params.scope)
        return "no good" if params.text == "bad" else ""


def of(tenant: str, text: str) -> GrammarParams:
    return replace(regex(text), scope=tenant)


def put(queue: GrammarCompileQueue, tenant: str, number: int) -> asyncio.Task[None]:
    return asyncio.ensure_future(queue.prepare(of(tenant, f"a{{{number + 1}}}")))


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def check_turns() -> None:
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.0)
    tasks = [put(queue, "x", number) for number in range(10)]
    await settled()
    tasks += [put(queue, tenant, number) for number in range(3) for tenant in ("y", "z")]
    await settled()
    compiler.open(16)
    await asyncio.gather(*tasks)
    # One of x's was being tried when the others came.
    assert compiler.order[:10] == ["x", *"xyz" * 3]
    assert compiler.order[10:] == ["x"] * 6


async def test_tenants_take_turns() -> None:
    await check_turns()


async def check_crowd() -> None:
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.5)
    crowd = [put(queue, "x", number) for number in range(MOST_WAITING + 1)]
    await settled()
    with pytest.raises(Overloaded):
        await queue.prepare(of("x", "one more"))
    others = [put(queue, "y", number) for number in range(MOST_OF_TENANT)]
    await settled()
    # The last of the crowd have made room; beyond its share y has none either.
    refused = [task for task in crowd if task.done()]
    assert refused == crowd[-MOST_OF_TENANT:]
    assert all(isinstance(task.exception(), Overloaded) for task in refused)
    with pytest.raises(Overloaded):
        await queue.prepare(of("y", "one more"))
    compiler.open(MOST_WAITING + 1)
    await asyncio.gather(*others, *(task for task in crowd if task not in refused))


async def test_a_crowd_makes_room_for_others_up_to_a_quarter() -> None:
    await check_crowd()


async def test_of_as_many_tenants_as_there_are_places_none_gives_its_only_one_up() -> None:
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.0)
    tasks = [put(queue, f"tenant {number}", number) for number in range(MOST_WAITING + 1)]
    await settled()
    with pytest.raises(Overloaded):
        await queue.prepare(of("late", "one more"))
    compiler.open(MOST_WAITING + 2)
    await asyncio.gather(*tasks)
    await asyncio.wait_for(put(queue, "late", 99), 10.0)


async def test_what_is_known_waits_for_nobody() -> None:
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.0)
    compiler.open(2)
    await queue.prepare(of("x", "good"))
    with pytest.raises(RequestError, match="no good"):
        await queue.prepare(of("x", "bad"))
    crowd = [put(queue, "x", number) for number in range(MOST_WAITING + 1)]
    await settled()
    await asyncio.wait_for(queue.prepare(of("x", "good")), 10.0)
    with pytest.raises(RequestError, match="no good"):
        await asyncio.wait_for(queue.prepare(of("x", "bad")), 10.0)
    compiler.open(len(crowd))
    await asyncio.gather(*crowd)


async def test_what_one_tenant_has_had_tried_is_new_to_another() -> None:
    """Its time says nothing of what others have asked for."""
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.0)
    compiler.open(2)
    await queue.prepare(of("x", "secret"))
    await queue.prepare(of("y", "secret"))
    await queue.prepare(of("x", "secret"))
    assert compiler.order == ["x", "y"]


async def test_who_leaves_gives_the_place_back() -> None:
    compiler = Gated()
    queue = GrammarCompileQueue(compiler, 1.0)
    crowd = [put(queue, "x", number) for number in range(MOST_WAITING + 1)]
    await settled()
    for task in crowd[1:]:
        task.cancel()
    await settled()
    assert not queue._waiting
    compiler.open(2)
    await asyncio.gather(crowd[0], put(queue, "x", 99))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self._waiting.move_to_end(tenant)", "pass"),
        ("last = self._waiting[most].pop()", "last = self._waiting[most].popleft()"),
        ("num_own >= MOST_OF_TENANT", "num_own >= 2 * MOST_OF_TENANT"),
    ],
    ids=["no turns", "the first leave", "half for one"],
)
async def test_a_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    put_in(monkeypatch, compile_queue, old, new)
    with pytest.raises((AssertionError, pytest.fail.Exception, TimeoutError)):
        async with asyncio.timeout(5.0):
            await check_turns()
            await check_crowd()
