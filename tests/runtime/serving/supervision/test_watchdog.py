"""A worker that hangs or dies is noticed: everybody is answered, health goes down, the process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider import CallError, Client
from outrider.engines.base import DeviceLostError, FloatArray
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Finished
from outrider.runtime.loop.totals import NUM_USUAL, Heartbeat
from outrider.runtime.serving.process import GUARD_EXIT_CODE
from outrider.runtime.serving.supervision import supervisor as serving
from outrider.runtime.serving.supervision.supervisor import LIVENESS
from outrider.runtime.serving.supervision.watchdog import FIRST_STEP_S, Watchdog

from tests.runtime.conftest import next_letter
from tests.runtime.markov import Clock, Harness
from tests.runtime.served import supervisor_of

STEP_S = 0.1


def watched(least_s: float = 10.0) -> tuple[Heartbeat, Clock, Watchdog]:
    """A worker of which one step of each kind has ended, and that is in one without a prompt."""
    heartbeat, clock = Heartbeat(), Clock()
    for reads_prompt in (True, False):
        heartbeat.reads_prompt = reads_prompt
        heartbeat.begin()
        heartbeat.end(STEP_S * (10 if reads_prompt else 1))
    heartbeat.begin()
    watchdog = Watchdog(heartbeat, least_s, clock)
    assert watchdog.complaint() is None
    return heartbeat, clock, watchdog


def late_after_s(clock: Clock, watchdog: Watchdog, tick_s: float = 0.5) -> float:
    began_s = clock.now
    while clock.now - began_s < 1000.0:
        clock.now += tick_s
        if watchdog.complaint():
            return clock.now - began_s
    raise AssertionError("nobody complained")


def test_a_step_is_late_beyond_the_least_time() -> None:
    _, clock, watchdog = watched()
    assert late_after_s(clock, watchdog) == 10.5


def test_a_step_is_late_beyond_twenty_times_its_like() -> None:
    """A chunk of prompt took a second, so a step with one may take twenty."""
    heartbeat, clock, watchdog = watched()
    heartbeat.end(STEP_S)
    heartbeat.reads_prompt = True
    heartbeat.begin()
    watchdog.complaint()
    assert late_after_s(clock, watchdog) == 20.5
    slow, clock, watchdog = watched(least_s=1.0)
    slow.took_s[False].extend([2.0, 2.0])
    assert late_after_s(clock, watchdog) == 40.5


def test_one_slow_step_allows_no_other_more_and_several_are_forgotten() -> None:
    heartbeat, clock, watchdog = watched(least_s=1.0)
    heartbeat.took_s[False].append(9.0)
    assert late_after_s(clock, watchdog) == 2.5
    heartbeat, clock, watchdog = watched(least_s=1.0)
    heartbeat.took_s[False].extend([9.0, 9.0] + [STEP_S] * NUM_USUAL)
    assert late_after_s(clock, watchdog) == 2.5


def test_a_long_chunk_of_prompt_allows_the_next_one_as_much_whatever_came_between() -> None:
    heartbeat, clock, watchdog = watched(least_s=1.0)
    heartbeat.reads_prompt = True
    heartbeat.took_s[True].clear()
    heartbeat.took_s[True].extend([3.0] + [STEP_S] * (NUM_USUAL - 1))
    assert late_after_s(clock, watchdog) == 60.5


def test_a_step_that_feeds_texts_again_has_the_time_of_prompts_and_allows_no_other_more() -> None:
    heartbeat, clock, watchdog = watched()
    for _ in range(3):
        clock.now += 9.0
        assert watchdog.complaint() is None
        heartbeat.begin()
    watchdog.complaint()
    assert late_after_s(clock, watchdog) == 20.5  # a chunk of prompt took a second
    heartbeat.end(600.0)
    heartbeat.reads_prompt = False
    heartbeat.begin()
    watchdog.complaint()
    assert late_after_s(clock, watchdog) == 10.5


def test_a_first_step_may_compile() -> None:
    heartbeat, clock = Heartbeat(), Clock()
    watchdog = Watchdog(heartbeat, 10.0, clock)
    heartbeat.begin()
    watchdog.complaint()
    assert late_after_s(clock, watchdog) == FIRST_STEP_S + 0.5


def test_steps_that_go_on_are_never_late() -> None:
    heartbeat, clock, watchdog = watched()
    for _ in range(100):
        clock.now += 9.0
        assert watchdog.complaint() is None
        heartbeat.end(STEP_S)
        heartbeat.begin()


def test_an_idle_worker_is_never_late() -> None:
    heartbeat, clock, watchdog = watched()
    heartbeat.end(STEP_S)
    for _ in range(100):
        clock.now += 9.0
        assert watchdog.complaint() is None


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    _, clock, watchdog = watched()
    clock.now += 3600.0
    assert watchdog.complaint() is None
    assert late_after_s(clock, watchdog) == 8.5


class Stuck:
    """Logits that block while the gate is closed, as a hung library does."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.has_stuck = threading.Event()

    def __call__(self, prefix: tuple[int, ...]) -> FloatArray:
        if not self.gate.is_set():
            self.has_stuck.set()
            self.gate.wait()
        return next_letter(prefix)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


async def reason_of(stream: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(CallError) as failure:
        async for _ in stream:  # type: ignore[attr-defined]
            pass
    return failure.value.code, failure.value.reason


async def health_of(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def looked(server: object, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds / 0.5)):
        clock.now += 0.5
        await supervisor_of(server).look()  # type: ignore[arg-type]


async def test_a_hung_step_ends_everybody_and_the_health(start, caplog):
    caplog.set_level(logging.CRITICAL)
    stuck, clock = Stuck(), Clock()
    async with start(target=stuck, clock=clock, max_batch=1) as run:
        async for _ in run.client.generate("a", max_tokens=70, temperature=0):
            pass
        with stuck.closed():
            streams = [run.client.generate("b", max_tokens=3) for _ in range(2)]
            waiting = [asyncio.ensure_future(reason_of(one)) for one in streams]
            assert await asyncio.to_thread(stuck.has_stuck.wait, 20.0)
            await looked(run.server, clock, 9.0)
            assert not any(one.done() for one in waiting)
            assert await health_of(run.address, "") == health_pb2.HealthCheckResponse.SERVING
            await looked(run.server, clock, 3.0)
            expected = (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTART")
            assert await asyncio.gather(*waiting) == [expected] * 2
            assert run.server.has_failed.is_set()
            for name in ("", "outrider.v1.Inference", LIVENESS):
                down = health_pb2.HealthCheckResponse.NOT_SERVING
                assert await health_of(run.address, name) == down
        assert "has not ended" in caplog.text
        assert "engines/reference/scripted.py" in caplog.text


async def test_everybody_is_answered_before_the_threads_are_told(
    start_endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_then: list[int] = []
    async with start_endless() as run:
        handler = run.server.readiness.handler
        monkeypatch.setattr(serving, "log_threads", lambda: open_then.append(handler.num_streams))
        supervisor = supervisor_of(run.server)
        stream = run.endless()
        await anext(stream)
        monkeypatch.setattr(supervisor.watchdog, "complaint", lambda: "the worker is lost")
        await asyncio.gather(supervisor.look(), reason_of(stream))
    assert open_then == [0]


async def test_a_drain_during_which_the_worker_hangs_says_that_streams_were_cut(start):
    stuck, clock = Stuck(), Clock()
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=60.0)
    options = (("grpc.service_config", "{}"),)  # without health checks: the server is not serving
    async with start(target=stuck, clock=clock, config=config, options=options) as run:
        async for _ in run.client.generate("a", max_tokens=70, temperature=0):
            pass
        with stuck.closed():
            cut = asyncio.ensure_future(reason_of(run.client.generate("b", max_tokens=3)))
            assert await asyncio.to_thread(stuck.has_stuck.wait, 20.0)
            drained = asyncio.ensure_future(run.server.drain())
            while not (await run.client.info()).load.is_draining:
                pass
            await looked(run.server, clock, 12.0)
            assert await cut == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTART")
        assert await drained == 1 + run.server.has_failed.is_set() == 2


async def test_a_watch_that_fails_ends_the_process(
    start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(serving, "WATCH_EVERY_S", 0.0)
    async with start() as run:
        monkeypatch.setattr(supervisor_of(run.server).watchdog, "complaint", broken)
        async with asyncio.timeout(20.0):
            await run.server.has_failed.wait()
    assert "ZeroDivisionError" in caplog.text


async def test_deadlines_and_queue_timeouts_hold_while_a_step_hangs(start):
    stuck, clock = Stuck(), Clock()
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0, queue_timeout_s=2.0)
    async with start(target=stuck, clock=clock, max_batch=1, config=config) as run:
        with stuck.closed():
            running = asyncio.ensure_future(reason_of(run.client.generate("b", max_tokens=3)))
            assert await asyncio.to_thread(stuck.has_stuck.wait, 20.0)
            queued = asyncio.ensure_future(reason_of(run.client.generate("c", max_tokens=3)))
            while run.server.readiness.handler.num_streams < 2:
                await health_of(run.address, "")
            await looked(run.server, clock, 2.5)
            assert not queued.done()
            await looked(run.server, clock, 1.5)
            assert await queued == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")
            assert not running.done()
            # Without the client's deadline, the server's own bounds it.
            clock.now += run.serving.limits.max_request_s
            await supervisor_of(run.server).look()
            assert await running == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        async for _ in run.client.generate("again", max_tokens=3):
            pass


@pytest.mark.parametrize("error", [SystemExit, DeviceLostError])
def test_the_worker_s_thread_does_not_end_without_a_word(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fatal(prefix: tuple[int, ...]) -> np.ndarray:
        raise error

    harness = Harness("F3")
    harness.target._logits_of = fatal
    harness.submit("a")
    harness.worker.start()
    harness.worker._thread.join(20.0)
    assert harness.worker.heartbeat.has_died
    assert "the worker's thread ended" in caplog.text
    assert Watchdog(harness.worker.heartbeat, 10.0, harness.clock).complaint()


class Quits(BaseException):
    """What no ``except Exception`` catches."""


@pytest.mark.parametrize("method", ["propose", "observe", "forget"])
@pytest.mark.parametrize("error", [SystemExit, Quits])
def test_a_drafter_that_quits_costs_nobody_an_answer(
    method: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def quits(*_: object) -> None:
        raise error("enough")

    harness = Harness("F3")
    drafter = harness.worker._parts.drafters["phrases"]
    monkeypatch.setattr(type(drafter), method, quits)
    for name in ("a", "b"):
        harness.submit(name, (1, 2, 1, 2), drafter="phrases", gamma=3)
    harness.run()
    for name in ("a", "b"):
        assert isinstance(harness.ending(name), Finished)
        reason = harness.finished(name).report.off_reason
        assert reason == ("DEGRADED" if method == "propose" else None)


DRAFTER = """
import threading
from typing import Self
from outrider.runtime.drafters.base import Draft, DrafterParts, DrafterCapabilities

class Hanging:
    capabilities = DrafterCapabilities(is_sampled=False)

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        return cls()

    def propose(self, live, chosen):
        threading.Event().wait()

    def observe(self, outcomes):
        pass

    def forget(self, key):
        pass
"""


@pytest.fixture
def hanging_drafter(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with an installed drafter that never returns."""
    info = tmp_path / "hanging-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[outrider.drafters]\nhanging = hanging:Hanging\n")
    (tmp_path / "hanging.py").write_text(DRAFTER)
    return tmp_path


async def started(bundle: Path, folder: Path, *options: str) -> asyncio.subprocess.Process:
    environment = {
        "PATH": "",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    command = ("-m", "outrider.runtime.cli", "serve", str(bundle), *options)
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_process_whose_engine_hangs_ends_by_itself(
    tiny_bundle: Path, hanging_drafter: Path
) -> None:
    options = ("--port", "0", "--device", "cpu", "--gamma", "2", "--hang-s", "1")
    server = await started(tiny_bundle, hanging_drafter, *options)
    try:
        assert server.stdout is not None
        line = await server.stdout.readline()
        address = f"127.0.0.1:{line.decode().split()[-1]}"
        async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
            # So many steps that the watchdog knows how long one takes.
            async for _ in client.generate("def", max_tokens=30, speculation={"drafter": "none"}):
                pass
            stream = client.generate("def", max_tokens=30, speculation={"drafter": "hanging"})
            found = await asyncio.wait_for(reason_of(stream), 60.0)
        assert found == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTART")
        _, errors = await asyncio.wait_for(server.communicate(), 60.0)
        assert server.returncode == GUARD_EXIT_CODE
        assert b"hanging.py" in errors and b"has not ended" in errors
    finally:
        if server.returncode is None:
            server.kill()
