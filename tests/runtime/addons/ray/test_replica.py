"""A replica as Ray's proxy calls it: what it answers, and what each message leaves the proxy's call to end with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from outrider.client import build_request
from outrider.runtime.addons.ray.context import LOST, CallContext
from outrider.runtime.addons.ray.replica import Replica
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions
from outrider.v1 import inference_pb2 as wire

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


@dataclass
class ProxyCall:
    """A call of the proxy: Ray hands its context to the replica, and takes it back with every message."""

    metadata: Sequence[tuple[str, str]] = ()
    code: grpc.StatusCode | None = None
    details: str = ""
    trailing: dict[str, Any] = field(default_factory=dict)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, Any]]) -> None:
        self.trailing = dict(trailing_metadata)

    @property
    def reason(self) -> str:
        status = status_pb2.Status.FromString(self.trailing["grpc-status-details-bin"])
        return status.details[0].value.decode(errors="replace")


Open = Callable[..., AbstractAsyncContextManager[Replica]]


@pytest.fixture
def open_replica(tiny_bundle: Path) -> Open:
    config = ServerConfig(default_gamma=2, max_running=2, message_interval_s=0.0,
                          prefix_cache_bytes=1 << 20)  # fmt: skip

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[Replica]:
        serving = partial(load_model, tiny_bundle, ServeOptions(config=config))
        replica = Replica(serving, **options)
        try:
            yield replica
        finally:
            await replica.close()

    return opened


async def answers(
    replica: Replica, call: ProxyCall, **options: Any
) -> list[tuple[wire.GenerateResponse, grpc.StatusCode | None]]:
    """Return every message, and the code that the proxy's call has from then on."""
    request = build_request("once upon", **options)
    return [
        (wire.GenerateResponse.FromString(message.SerializeToString()), call.code)
        async for message in replica.Generate(request, call)
    ]


async def test_an_answer_ends_unavailable_until_its_last_message(open_replica: Open) -> None:
    call = ProxyCall()
    async with open_replica() as replica:
        messages = await answers(replica, call, max_tokens=6, ignore_eos=True, temperature=0.0)
    responses = [response for response, _ in messages]
    assert responses[0] == wire.GenerateResponse()
    assert [code for _, code in messages] == [UNAVAILABLE] * (len(messages) - 1) + [OK]
    assert [one.HasField("finish") for one in responses] == [False] * (len(messages) - 1) + [True]
    assert sum(len(one.tokens) for one in responses) == 6
    assert call.details != LOST and not call.trailing


async def test_several_completions_end_with_the_last_of_them(open_replica: Open) -> None:
    async with open_replica() as replica:
        messages = await answers(replica, ProxyCall(), max_tokens=3, ignore_eos=True, n=2)
    finishes = [response.HasField("finish") for response, _ in messages]
    assert sum(finishes) == 2 and finishes[-1]
    assert [code for _, code in messages] == [UNAVAILABLE] * (len(messages) - 1) + [OK]


async def test_a_refusal_is_told_beside_an_empty_message_with_its_reason(
    open_replica: Open,
) -> None:
    call = ProxyCall()
    async with open_replica() as replica:
        messages = await answers(replica, call, temperature=-1.0)
    refused = wire.GenerateResponse()
    assert messages == [(refused, UNAVAILABLE), (refused, grpc.StatusCode.INVALID_ARGUMENT)]
    assert "sampling.temperature" in call.details and "INVALID_PARAMETER" in call.reason


async def test_who_leaves_ends_what_is_being_answered() -> None:
    context, is_over = CallContext(ProxyCall()), asyncio.Event()

    async def endless() -> None:
        try:
            while True:
                await context.write(b"")
        finally:
            is_over.set()

    stream = context.stream(endless(), 1)
    for _ in range(3):
        await anext(stream)
    await stream.aclose()
    assert is_over.is_set()


async def test_a_tenant_is_believed_only_where_that_was_asked_for(open_replica: Open) -> None:
    named = (("outrider-tenant", "a"),)
    async with open_replica() as replica:
        for method, request in (
            (replica.GetServerInfo, wire.GetServerInfoRequest()),
            (replica.Abort, wire.AbortRequest(request_ids=["a"])),
        ):
            call = ProxyCall(named)
            assert (await method(request, call)).SerializeToString() == b""
            assert call.code == grpc.StatusCode.PERMISSION_DENIED
        assert (await answers(replica, call := ProxyCall(named)))[-1][1] == call.code
        assert call.code == grpc.StatusCode.PERMISSION_DENIED
    async with open_replica(trusts_tenants=True) as replica:
        call = ProxyCall(named)
        assert (await answers(replica, call, max_tokens=1))[-1][1] == OK


async def test_only_who_is_believed_finds_what_his_tenant_asked_before(open_replica: Open) -> None:
    """The proxy's caller is on this machine, as all are behind a balancer there; that proves nothing."""

    async def cached(replica: Replica, *metadata: tuple[str, str]) -> list[int]:
        request = build_request([*range(10, 74)], max_tokens=1)
        found = []
        for _ in range(2):
            *_, last = [one async for one in replica.Generate(request, ProxyCall(metadata))]
            response = wire.GenerateResponse.FromString(last.SerializeToString())
            found.append(int(response.finish.usage.cached_tokens))
        return found

    async with open_replica(trusts_tenants=True) as replica:
        assert await cached(replica) == [0, 0]
        first, second = await cached(replica, ("outrider-tenant", "a"))
        assert first == 0 < second


async def test_texts_are_tokenised_and_requests_aborted_by_id(open_replica: Open) -> None:
    async with open_replica() as replica:
        data = await replica.Tokenize(wire.TokenizeRequest(text="a house"), ProxyCall())
        assert wire.TokenizeResponse.FromString(data.SerializeToString()).ids
        call = ProxyCall()
        data = await replica.Abort(wire.AbortRequest(request_ids=["nobody"]), call)
        assert wire.AbortResponse.FromString(data.SerializeToString()) == wire.AbortResponse()
        assert call.code is None
        await replica.Abort(wire.AbortRequest(), call)
        assert call.code == grpc.StatusCode.INVALID_ARGUMENT and "request_ids" in call.details


async def test_an_internal_error_names_an_id_and_nothing_else(
    open_replica: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_replica() as replica:
        call = ProxyCall()

        def fail(*_: object) -> None:
            raise OSError("/secret/path")

        monkeypatch.setattr("outrider.runtime.serving.v1.methods.describe", fail)
        await replica.GetServerInfo(wire.GetServerInfoRequest(), call)
    assert call.code == grpc.StatusCode.INTERNAL and "secret" not in call.details


async def test_ray_is_told_of_an_engine_that_is_lost(open_replica: Open) -> None:
    async with open_replica() as replica:
        replica.check_health()
        replica.has_failed.set()
        with pytest.raises(RuntimeError, match="engine is lost"):
            replica.check_health()
