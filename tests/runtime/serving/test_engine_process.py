"""Engines in a process of their own: it may be killed or hang, and every stream still ends, with the same tokens.

One server serves most of the tests: whatever one does to its engine, the next one finds another.
"""

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
import pytest_asyncio
from outrider import CallError, Client
from outrider.engines.base import BundleError
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.engine_process.child import DEAD_EXIT_CODE
from outrider.runtime.serving.engine_process.messages import FromChild, StepEvents
from outrider.runtime.serving.engine_process.process import EngineProcess
from outrider.runtime.serving.engine_process.worker import IsolatedWorker, open_isolated
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.settings import ServeOptions
from outrider.v1 import inference_pb2 as wire

from tests.runtime.served import begin, server_of, supervisor_of

CONFIG = ServerConfig(default_gamma=2, lb_delay_s=0.0, drain_timeout_s=0.0, message_interval_s=0.0)
OPTIONS = ServeOptions(config=CONFIG, isolates_engine=True)
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTART")
TOKENS = 60

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Isolated:
    client: Client
    server: Server
    worker: IsolatedWorker

    @property
    def pid(self) -> int:
        return self.worker._engine.pid

    async def answer(self, **options: object) -> list[int]:
        return await answer(self.client, **options)

    async def begun(self, prompt: str, **options: object) -> AsyncIterator[wire.GenerateResponse]:
        """A long stream whose engine is stopped as soon as its first tokens are here."""
        to_stop, take = [self.pid], self.worker._take

        def take_and_stop(told: FromChild) -> None:
            # Once, and before the tokens are here: who has them may let the engine go on at once.
            if isinstance(told, StepEvents) and told.events and to_stop:
                os.kill(to_stop.pop(), signal.SIGSTOP)
            take(told)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.worker, "_take", take_and_stop)
            stream = self.client.generate(prompt, max_tokens=200, temperature=0.0, **options)
            await anext(stream)
        return stream

    async def until_restarted(self, num_restarts: int) -> None:
        async with asyncio.timeout(60.0):
            while self.worker.num_restarts < num_restarts:
                await self.client.info()


async def answer(client: Client, **options: object) -> list[int]:
    stream = client.generate("def", **{"max_tokens": TOKENS, "seed": 5, **options})
    responses = sorted([response async for response in stream], key=lambda one: one.index)
    return [token.id for response in responses for token in response.tokens]


async def scored(client: Client) -> list[str]:
    """An echoed prompt with its log-probabilities, and no answer."""
    stream = client.generate("def main", prompt_logprobs=2, echo=True, max_tokens=0)
    said = [response async for response in stream]
    assert said[0].prompt[-1].HasField("logprob") and said[0].text == "def main"
    return [f"{response.text} {response.prompt}" for response in said]


@asynccontextmanager
async def served(server: Server, serving: LoadedModel) -> AsyncIterator[Client]:
    port = await begin(server, serving)
    # Health is no reason to refuse calls here, and no call is sent twice.
    options = (("grpc.enable_retries", 0), ("grpc.service_config", "{}"))
    async with Client(f"127.0.0.1:{port}", options=options) as client:
        try:
            yield client
        finally:
            server.hurry()
            await server.drain()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated(tiny_bundle: Path) -> AsyncIterator[Isolated]:
    serving = open_isolated(tiny_bundle, OPTIONS)
    assert isinstance(serving.worker, IsolatedWorker)
    server = server_of(serving)
    async with served(server, serving) as client:
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
        {"n": 3, "max_tokens": 8},
        {"regex": "[a-e]+( [0-9]{4})?", "temperature": 1.0, "max_tokens": 12},
    ]
    serving = load_model(tiny_bundle, OPTIONS)
    async with served(server_of(serving), serving) as client:
        assert [await answer(isolated.client, **one) for one in calls] == [
            await answer(client, **one) for one in calls
        ]
        assert str(await isolated.client.info()) == str(await client.info())
        assert await scored(isolated.client) == await scored(client)
    stream = await isolated.begun("def", request_id="long")
    aborted = asyncio.ensure_future(isolated.client.abort("long"))
    while not any(one.cancelled for one in isolated.worker._unfinished.values()):
        await isolated.client.info()
    os.kill(isolated.pid, signal.SIGCONT)
    assert list(await aborted) == ["long"]
    assert (await failure(stream))[1] == "ABORTED_BY_RPC"
    assert not (await isolated.client.info()).load.num_running


async def test_a_killed_engine_ends_the_stream_that_began_and_serves_the_rest_again(
    isolated: Isolated,
) -> None:
    expected = await isolated.answer(temperature=1.0)
    num_restarts, pid = isolated.worker.num_restarts, isolated.pid
    began = await isolated.begun("abc")
    waiting = [asyncio.ensure_future(isolated.answer(temperature=1.0)) for _ in range(6)]
    while isolated.server.readiness.handler.num_streams < 7:
        await isolated.client.info()
    os.kill(pid, signal.SIGKILL)
    while isolated.worker.is_ready:
        await isolated.client.info()
    assert await failure(isolated.client.generate("late")) == UNAVAILABLE
    assert await failure(began) == UNAVAILABLE
    assert await asyncio.gather(*waiting) == [expected] * 6
    assert isolated.worker.num_restarts == num_restarts + 1
    assert await isolated.answer(temperature=1.0) == expected


async def test_an_engine_that_hangs_is_replaced(
    isolated: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await isolated.answer(temperature=0.0)
    num_restarts = isolated.worker.num_restarts
    stream = await isolated.begun("abc")
    with monkeypatch.context() as patch:
        supervisor = supervisor_of(isolated.server)
        patch.setattr(supervisor.watchdog, "complaint", lambda: "it hangs")
        while isolated.worker.is_ready:
            await supervisor.look()
        # A stopped process does not die of the first signal.
        await supervisor.look()
    async with asyncio.timeout(60.0):
        assert await failure(stream) == UNAVAILABLE
    await isolated.until_restarted(num_restarts + 1)
    assert await isolated.answer(temperature=0.0) == expected


async def test_a_drain_lets_a_running_request_finish(isolated: Isolated) -> None:
    pid, last = isolated.pid, await isolated.begun("abc", ignore_eos=True)
    isolated.worker.drain()
    os.kill(pid, signal.SIGCONT)
    responses = [one async for one in last]
    assert responses[-1].finish.reason == wire.FINISH_REASON_LENGTH
    assert await asyncio.to_thread(isolated.worker.stop, 0.0)


async def test_a_bundle_that_is_refused_is_refused_as_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as apart:
        open_isolated(tmp_path, OPTIONS)
    with pytest.raises(BundleError) as together:
        load_model(tmp_path, OPTIONS)
    assert str(apart.value) == str(together.value)


HANGS = "import threading\n\nthreading.Event().wait()\n"


async def test_the_engine_ends_with_the_process_that_started_it(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = EngineProcess(tiny_bundle, OPTIONS)
    (tmp_path / "onnxruntime.py").write_text(HANGS)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    opening = EngineProcess(tiny_bundle, OPTIONS)
    try:
        await asyncio.to_thread(serving.opened, 60.0)
        for engine in (serving, opening):
            engine._outgoing.put(None)
            engine._sender.join()
            engine._connection.close()
        for engine in (serving, opening):
            assert await asyncio.to_thread(engine._process.wait, 60.0) == DEAD_EXIT_CODE
    finally:
        serving.kill()
        opening.kill()
