"""Ports open before the model does: until then probes and callers are told so, and a start can be ended."""

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider import CallError, Client
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving import process as serving
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.served import server_of

CONFIG = ServerConfig(default_gamma=2, lb_delay_s=0.0, drain_timeout_s=0.0)
# A server whose bundle never opens; it says so on its standard output.
STUCK = """
import asyncio, sys, threading
from pathlib import Path
from outrider.runtime.serving import process as server
from outrider.runtime.serving.settings import ServeOptions

def stuck(root, options):
    print("opening", flush=True)
    threading.Event().wait()

server.load_model = stuck
asyncio.run(server.serve(Path("bundle"), ServeOptions(address="127.0.0.1:0")))
"""


async def health_of(address: str, name: str) -> int:
    async with aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_until_a_model_is_open_callers_learn_what_the_start_is_at(tiny_bundle: Path):
    states = health_pb2.HealthCheckResponse
    opened = load_model(tiny_bundle, ServeOptions(config=CONFIG))
    server = server_of(opened)
    address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    options = (("grpc.enable_retries", 0), ("grpc.service_config", "{}"))
    async with Client(address, options=options) as client:
        server.readiness.note("measuring what steps cost")
        calls = (client.info(), client.tokenize("abc"), client.abort("a"), client.complete("abc"))
        for call in calls:
            with pytest.raises(CallError) as refused:
                await call
            code, reason = refused.value.code, refused.value.reason
            assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
            assert "measuring what steps cost" in str(refused.value)
        names = ("", "outrider.v1.Inference", "liveness")
        answers = [await health_of(address, name) for name in names]
        assert answers == [states.NOT_SERVING, states.NOT_SERVING, states.SERVING]
        await server.open(opened)
        assert [await health_of(address, name) for name in names] == [states.SERVING] * 3
        assert (await client.complete("abc", max_tokens=3)).usage.output_tokens == 3
    server.hurry()
    await server.drain()
    opened.close()


async def test_stages_of_a_start_reach_probes_while_the_event_loop_is_free(
    monkeypatch: pytest.MonkeyPatch,
):
    readiness = ServerState(RequestAccounting(Metrics(), clock=lambda: 0.0))
    measuring, seen = threading.Event(), threading.Event()

    def opened(root: Path, options: ServeOptions) -> str:
        with options.stage("measuring"):
            measuring.set()
            assert seen.wait(60.0)
        return readiness.stage

    monkeypatch.setattr(serving, "load_model", opened)
    opening = asyncio.ensure_future(
        serving._open(Path("bundle"), ServeOptions(stage=nullcontext), readiness)
    )
    assert await asyncio.to_thread(measuring.wait, 60.0)
    assert readiness.stage == "measuring"
    assert not readiness.is_open
    seen.set()
    assert await opening == "opening the bundle"


def test_sigterm_ends_a_start_whose_bundle_is_still_being_opened():
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"opening\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60.0)
    assert (process.returncode, errors) == (0, b"")
