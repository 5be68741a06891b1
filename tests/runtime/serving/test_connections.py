"""Connections are bounded in number, in the time to say what they want, and in what they leave behind."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import subprocess
import sys

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving import server
from outrider.runtime.serving.supervision import memory

from tests.http2 import PREFACE, SETTINGS, connect, frame, long_headers, repeated_headers

PATIENCE_S = 60.0
GREETING = PREFACE + frame(SETTINGS)
PATH = b"/outrider.v1.Inference/GetServerInfo"


async def is_serving(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_too_many_is_closed_and_the_others_stay(start) -> None:
    config = ServerConfig(max_connections=3, lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start(config=config) as run:
        await run.client.info()
        held = [one for _ in range(12) if (one := await connect(run.address, GREETING))]
        ends = [asyncio.ensure_future(one.is_closed_by_server(PATIENCE_S)) for one in held]
        # gRPC may take one connection more than it is told.
        for end in itertools.islice(asyncio.as_completed(ends), len(held) - 3):
            assert await end
        await run.client.info()
        for end, one in zip(ends, held, strict=True):
            end.cancel()
            one.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_connection_that_says_nothing_is_closed(start, monkeypatch) -> None:
    options = {**dict(server.SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": 100}
    assert dict(server.SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 10_000
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(options.items()))
    async with start() as run:
        silent = await connect(run.address)
        assert silent is not None
        assert await silent.is_closed_by_server(PATIENCE_S)


@pytest.mark.parametrize("bomb", [long_headers(PATH, 1 << 18), repeated_headers(PATH, 1 << 20)])
async def test_header_bombs_harm_nobody_else(start, bomb: bytes) -> None:
    async with start() as run, grpc.aio.insecure_channel(run.address) as channel:
        held = [await connect(run.address, GREETING + bomb) for _ in range(8)]
        assert await is_serving(channel)
        for one in held:
            if one is not None:
                one.close()
        assert await is_serving(channel)


async def test_metadata_beyond_the_limit_is_refused_by_grpc(start) -> None:
    async with start() as run, grpc.aio.insecure_channel(run.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(health_pb2.HealthCheckRequest(), metadata=(("x", "y" * 20_000),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_serving(channel)


def test_freed_memory_goes_back_to_the_system() -> None:
    give_back = memory.trimmer()
    if give_back is None:
        pytest.skip("this system's C library is not glibc")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    resident = psutil.Process().memory_info
    blocks = [libc.malloc(16_384) for _ in range(4096)]
    for block in blocks:
        ctypes.memset(block, 1, 16_384)
    # One in 16 stays, so that nothing can be given back by itself.
    for number, block in enumerate(blocks):
        if number % 16:
            libc.free(block)
    before = resident().rss
    give_back()
    given_back = before - resident().rss
    for block in blocks[::16]:
        libc.free(block)
    assert given_back > 30 << 20


ARENAS = """
import ctypes, sys, threading
from outrider.runtime.serving.supervision.memory import use_few_arenas
if sys.argv[1] == "few":
    assert use_few_arenas()
libc, all_here = ctypes.CDLL(None), threading.Barrier(9)
def allocate():
    libc.malloc(100)
    all_here.wait()
    all_here.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
all_here.wait()
libc.malloc_stats()
all_here.wait()
"""


@pytest.mark.skipif(memory.trimmer() is None, reason="the C library is not glibc")
def test_threads_share_two_arenas() -> None:
    def num_arenas(way: str) -> int:
        command = [sys.executable, "-c", ARENAS, way]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return run.stderr.count("Arena ")

    assert num_arenas("few") == 2
    assert num_arenas("many") > 2
