"""Callers of whom nothing more can be written: they read nothing, or go away while a message waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
from pathlib import Path

import pytest
from outrider.runtime.core.errors import SlowConsumer
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.v1 import responses
from outrider.v1 import inference_pb2 as wire

from tests.http2 import (
    PREFACE,
    SETTINGS,
    RawConnection,
    connect,
    frame,
    opening_fields,
    split_headers,
)
from tests.runtime.addons.kserve.requests import streamed
from tests.runtime.addons.vllm.requests import ask

# Seconds until a condition that never comes true fails its test.
PATIENCE_S = 60.0
DATA, RST_STREAM, WINDOW_UPDATE = 0, 3, 8
CANCEL = 8
# What a client takes of a stream before it says that it takes more (RFC 9113, section 6.5.2).
NO_WINDOW = frame(SETTINGS, struct.pack(">HI", 4, 0))
ALL = ServeOptions(has_kserve=True, has_vllm_grpc=True)
LETTERS = wire.GenerateRequest(text="abc", max_tokens=40)
CALLS = {
    "v1": (b"/outrider.v1.Inference/Generate", LETTERS),
    "vllm": (b"/vllm.grpc.engine.VllmEngine/Generate", ask(stream=True, max_tokens=40)),
    "kserve": (b"/inference.GRPCInferenceService/ModelStreamInfer", streamed(max_tokens=40)),
}
WRONG = (CALLS["kserve"][0], streamed(temperature=9))


async def unread(address: str, path: bytes, request) -> RawConnection:
    """A call of a client that takes headers and nothing else."""
    message = request.SerializeToString()
    data = frame(DATA, struct.pack(">BI", 0, len(message)) + message, stream=1)
    headers = split_headers(opening_fields(path), has_end=True)
    connection = await connect(address, PREFACE + NO_WINDOW + headers + data)
    assert connection is not None
    return connection


async def until(run, is_so) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await run.client.info()


@pytest.mark.parametrize("ends", ["close", "reset"])
@pytest.mark.parametrize("protocol", CALLS)
async def test_who_goes_away_while_a_message_waits_has_cancelled_and_is_no_bug(
    start, tmp_path: Path, caplog, protocol, ends
):
    path = tmp_path / "audit"
    async with start(serve_options=ALL, audit=AuditLog(path)) as run:
        handler, worker = run.server.readiness.handler, run.serving.worker
        caller = await unread(run.address, *CALLS[protocol])
        await until(run, lambda: handler.num_streams)
        await until(run, lambda: worker.snapshot().num_free_slots == 4)
        if ends == "close":
            caller.close()
        else:
            caller.writer.write(frame(RST_STREAM, struct.pack(">I", CANCEL), stream=1))
        await until(run, lambda: not handler.num_streams)
        caller.close()
    assert "internal error" not in caplog.text
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["code"], line["reason"]) == ("CANCELLED", "CLIENT_CANCELLED")


@pytest.fixture
def refused(monkeypatch) -> asyncio.Event:
    """Set when a call is to be ended with an error's status."""
    has_refused, refuse = asyncio.Event(), responses.refuse

    async def noting(*arguments):
        has_refused.set()
        await refuse(*arguments)

    monkeypatch.setattr(responses, "refuse", noting)
    return has_refused


@pytest.mark.parametrize("call", [*CALLS.values(), WRONG], ids=[*CALLS, "wrong"])
async def test_who_reads_not_even_a_small_first_message_is_told_so_when_he_reads(
    start, refused, call
):
    async with start(serve_options=ALL, stall_timeout_s=0.2) as run, asyncio.timeout(PATIENCE_S):
        caller = await unread(run.address, *call)
        await refused.wait()
        assert run.server.readiness.handler.num_streams == 0
        assert run.serving.worker.snapshot().num_free_slots == 4
        caller.writer.write(frame(WINDOW_UPDATE, struct.pack(">I", 1 << 20), stream=1))
        told = b""
        while str(SlowConsumer()).encode() not in told:
            piece = await caller.reader.read(1 << 16)
            assert piece, told
            told += piece
        caller.close()


@pytest.mark.parametrize("ends", ["close", "drain"])
async def test_a_first_message_that_nobody_took_leaves_no_task(start, refused, caplog, ends):
    async with start(stall_timeout_s=0.2) as run:
        await run.client.info()
        before = asyncio.all_tasks()
        caller = await unread(run.address, *CALLS["v1"])
        await refused.wait()
        if ends == "close":
            left = asyncio.all_tasks() - before
            caller.close()
            # Among them is gRPC's own, which waits for the next call.
            await run.client.info()
            _, pending = await asyncio.wait(left, timeout=PATIENCE_S)
            assert not pending
    assert asyncio.all_tasks() == {asyncio.current_task()}
    caller.close()
    gc.collect()
    assert not caplog.text
