"""Shares, audit lines and deadlines hold for every protocol of gRPC, by one method of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from outrider.errors import decode_error
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.settings import ServeOptions

from tests.runtime.addons.kserve.requests import infer_request, streamed
from tests.runtime.addons.vllm.requests import ask
from tests.runtime.conftest import ENDLESS_TOKENS
from tests.runtime.serving.security.credentials import bearer, key_security, write

ALL_DIALECTS = ServeOptions(has_kserve=True, has_vllm_grpc=True)
LONG = ENDLESS_TOKENS - 10


class Method(NamedTuple):
    path: str
    short: Message
    endless: Message


METHODS = {
    "ModelInfer": Method(
        "/inference.GRPCInferenceService/ModelInfer",
        infer_request("secret", temperature=0.0, max_tokens=3),
        infer_request(temperature=0.0, max_tokens=LONG),
    ),
    "ModelStreamInfer": Method(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        streamed("secret", temperature=0.0, max_tokens=3),
        streamed(temperature=0.0, max_tokens=LONG),
    ),
    "Generate": Method(
        "/vllm.grpc.engine.VllmEngine/Generate",
        ask("secret", max_tokens=3),
        ask(max_tokens=LONG),
    ),
}


async def outcome(
    channel: grpc.aio.Channel, method: Method, keys: Sequence[str] = (), timeout_s: float = 60.0
) -> str:
    """How a short call ends: its code and reason; of a stream what its only message says."""
    metadata = tuple(pair for key in keys for pair in bearer(key).items())
    request = method.short if timeout_s > 10.0 else method.endless
    call = channel.stream_stream(method.path)(
        iter([request.SerializeToString()]), metadata=metadata, timeout=timeout_s
    )
    try:
        answers = [answer async for answer in call]
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {decode_error(error).reason}".strip()
    # Of a stream of several requests each is told its own failure.
    told = [
        one for one in ("QUOTA_EXCEEDED", "DEADLINE") if any(one.encode() in i for i in answers)
    ]
    return told[0] if told else "OK"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", METHODS)
async def test_a_tenants_share_and_the_audit_log_are_those_of_generate(start, tmp_path, name):
    tenants, log = tmp_path / "tenants", tmp_path / "audit"
    write(tenants, "[tenants.x]\nrequests_per_s = 0.001\nburst_requests = 1\n")
    security, keys = key_security(tmp_path, tenants=tenants)
    method = METHODS[name]
    async with (
        start(security=security, audit=AuditLog(log), serve_options=ALL_DIALECTS) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        assert await outcome(channel, method, [keys["x"]]) == "OK"
        assert "QUOTA_EXCEEDED" in await outcome(channel, method, [keys["x"]])
        assert await outcome(channel, method, [keys["y"]]) == "OK"
        assert await outcome(channel, method) == "UNAUTHENTICATED UNAUTHENTICATED"
    told = [(one["tenant"], one["outcome"], one["reason"]) for one in lines(log)]
    assert told == [
        ("x", "admitted", "length"),
        ("x", "refused", "QUOTA_EXCEEDED"),
        ("y", "admitted", "length"),
        ("", "refused", "UNAUTHENTICATED"),
    ]
    admitted = lines(log)[0]
    assert admitted["method"] == name
    assert (admitted["key"], admitted["prompt_tokens"], admitted["output_tokens"]) == (
        "key:key-of-x",
        6,
        3,
    )
    assert "secret" not in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
async def test_a_callers_deadline_ends_his_request(start_endless, name):
    async with (
        start_endless(serve_options=ALL_DIALECTS, max_batch=1) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        told = await outcome(channel, METHODS[name], timeout_s=0.3)
        assert told.startswith("DEADLINE")
        # The only slot is free again.
        assert (await run.client.complete("a", max_tokens=3, temperature=0)).text == "bcd"
