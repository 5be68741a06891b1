"""Engines in a process of their own: it may be killed or hang, and every stream still ends, with the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from outrider import CallError, Client
from outrider.engines.base import BundleError
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.isolated.messages import Told
from outrider.runtime.serving.isolated.worker import (
    MOST_VAIN_STARTS,
    IsolatedWorker,
    open_isolated,
)
from outrider.runtime.serving.opening import ServeOptions, open_serving
from outrider.runtime.serving.server import Server
from outrider.v1 import inference_pb2 as wire

CONFIG = ServerConfig(
    default_gamma=2, lb_delay_s=0.0, drain_timeout_s=0.0, hang_s=2.0, message_interval_s=0.0
)
OPTIONS = ServeOptions(config=CONFIG, isolates_engine=True)
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTART")
TOKENS = 60


@dataclass(frozen=True)
class Isolated:
    client: Client
    server: Server
    worker: IsolatedWorker

    @property
    def pid(self) -> int:
        return self.worker._engine.process.pid

    async def answer(self, **options: object) -> list[int]:
        return await answer(self.client, **options)

    async def until_restarted(self, num_restarts: int) -> None:
        async with asyncio.timeout(60.0):
            while self.worker.num_restarts < num_restarts or not self.worker.is_ready:
                await self.client.info()


async def answer(client: Client, **options: object) -> list[int]:
    stream = client.generate("def", **{"max_tokens": TOKENS, "seed": 5, **options})
    return [token.id async for response in stream for token in response.tokens]


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[Client]:
    port = await server.start("127.0.0.1:0")
    # Health is no reason to refuse calls here, and no call is sent twice.
    options = (("grpc.enable_retries", 0), ("grpc.service_config", "{}"))
    async with Client(f"127.0.0.1:{port}", options=options) as client:
        try:
            yield client
        finally:
            server.hurry()
            await server.drain()


@pytest.fixture
async def isolated(tiny_bundle: Path) -> AsyncIterator[Isolated]:
    serving = open_isolated(tiny_bundle, OPTIONS)
    assert isinstance(serving.worker, IsolatedWorker)
    server = Server(serving)
    async with served(server) as client:
        yield Isolated(client, server, serving.worker)


async def failure(stream: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(CallError) as caught:
        async for _ in stream:  # type: ignore[attr-defined]
            pass
    return caught.value.code, caught.value.reason


async def test_answers_info_aborts_and_refusals_are_those_of_one_process(
    isolated: Isolated, tiny_bundle: Path
) -> None:
    calls = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "speculation": {"drafter": "phrases"}},
        {"num_beams": 2, "temperature": 0.0, "max_tokens": 8},
        {"logprobs": 2, "stop": ["e"]},
    ]
    async with served(Server(open_serving(tiny_bundle, OPTIONS))) as client:
        assert [await answer(isolated.client, **one) for one in calls] == [
            await answer(client, **one) for one in calls
        ]
        assert str(await isolated.client.info()) == str(await client.info())
    stream = isolated.client.generate("def", max_tokens=200, request_id="long", temperature=0.0)
    await anext(stream)
    assert list(await isolated.client.abort("long")) == ["long"]
    assert (await failure(stream))[1] == "ABORTED_BY_RPC"
    assert not (await isolated.client.info()).load.num_running
    last = isolated.client.generate("abc", max_tokens=40, temperature=0.0)
    await anext(last)
    isolated.worker.drain()
    responses = [one async for one in last]
    assert responses[-1].finish.reason == wire.FINISH_REASON_LENGTH
    assert await asyncio.to_thread(isolated.worker.stop, 0.0)


async def test_a_killed_engine_ends_the_stream_that_began_and_serves_the_rest_again(
    isolated: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await isolated.answer(temperature=1.0)
    pid, take = isolated.pid, isolated.worker._take

    def take_and_stop(told: Told) -> None:
        take(told)
        if told.events:
            os.kill(pid, signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(isolated.worker, "_take", take_and_stop)
        began = isolated.client.generate("abc", max_tokens=200, temperature=1.0)
        await anext(began)
    waiting = [asyncio.ensure_future(isolated.answer(temperature=1.0)) for _ in range(6)]
    while isolated.server._service.num_streams < 7:
        await isolated.client.info()
    os.kill(pid, signal.SIGKILL)
    while isolated.worker.is_ready:
        await isolated.client.info()
    assert await failure(isolated.client.generate("late")) == UNAVAILABLE
    assert await failure(began) == UNAVAILABLE
    assert await asyncio.gather(*waiting) == [expected] * 6
    assert isolated.worker.num_restarts == 1
    assert await isolated.answer(temperature=1.0) == expected


async def test_an_engine_that_hangs_is_replaced(isolated: Isolated) -> None:
    expected = await isolated.answer(temperature=0.0)
    stream = isolated.client.generate("abc", max_tokens=200, temperature=0.0)
    await anext(stream)
    os.kill(isolated.pid, signal.SIGSTOP)
    async with asyncio.timeout(60.0):
        assert await failure(stream) == UNAVAILABLE
    await isolated.until_restarted(1)
    assert await isolated.answer(temperature=0.0) == expected


async def test_engines_that_serve_nobody_end_the_server(
    isolated: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    await isolated.answer()

    def broken() -> None:
        raise BundleError("the bundle is gone")

    monkeypatch.setattr(isolated.worker, "_open", broken)
    monkeypatch.setattr("outrider.runtime.serving.isolated.worker.LONGEST_PAUSE_S", 0.0)
    os.kill(isolated.pid, signal.SIGKILL)
    async with asyncio.timeout(30.0):
        await isolated.server.has_failed.wait()
    assert isolated.worker._num_vain == MOST_VAIN_STARTS + 1
    assert await failure(isolated.client.generate("a", max_tokens=1)) == UNAVAILABLE


def test_a_bundle_that_is_refused_is_refused_as_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as apart:
        open_isolated(tmp_path, OPTIONS)
    with pytest.raises(BundleError) as together:
        open_serving(tmp_path, OPTIONS)
    assert str(apart.value) == str(together.value)


async def test_the_engine_ends_with_the_process_that_started_it(tiny_bundle: Path) -> None:
    worker = IsolatedWorker(tiny_bundle, OPTIONS)
    worker._engine.connection.close()
    assert await asyncio.to_thread(worker._engine.process.wait, 30.0) is not None
    worker._engine.end()
