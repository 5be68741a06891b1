"""What was let in is told as ended, however it ends: else its connection would never be idle again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from outrider import Client
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.authenticator import Authenticator
from outrider.runtime.serving.security.gate import Gate
from outrider.runtime.serving.security.grpc_gate import GrpcGate
from outrider.runtime.serving.security.places import Places

from tests.runtime.serving.http.client import Http

METHOD, PEER = "/a.B/C", "ipv4:10.0.0.1:5"
PATIENCE_S = 60.0


class Context:
    """A call's, of which gRPC has freed what ``peer`` reads once the method has begun."""

    def __init__(self) -> None:
        self.has_told = False

    def peer(self) -> str:
        assert not self.has_told
        self.has_told = True
        return PEER

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> Mapping[str, Any]:
        return {}


async def guarded(handler: grpc.RpcMethodHandler, left: list[str]) -> Any:
    """The handler of a method behind the gate."""
    gate = GrpcGate(
        Gate(Authenticator(), lambda *refusal: None, left=left.append),
        {METHOD: "info"},
        has_open_health=False,
    )

    async def continuation(details: object) -> grpc.RpcMethodHandler:
        return handler

    return await gate.intercept_service(continuation, SimpleNamespace(method=METHOD))


async def test_a_stream_that_is_cancelled_asks_its_context_for_nothing() -> None:
    async def answers(request: bytes, context: object) -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    left: list[str] = []
    handler = await guarded(grpc.unary_stream_rpc_method_handler(answers), left)
    async with aclosing(handler.unary_stream(b"", Context())) as stream:
        assert await anext(stream) == b"x" and left == []
    assert left == [PEER]


async def test_a_call_that_fails_has_ended() -> None:
    async def fail(request: bytes, context: object) -> bytes:
        raise ValueError

    left: list[str] = []
    handler = await guarded(grpc.unary_unary_rpc_method_handler(fail), left)
    with pytest.raises(ValueError):
        await handler.unary_unary(b"", Context())
    assert left == [PEER]


async def until_idle(http: Http, places: Places) -> None:
    """Wait by what is not counted itself: gRPC tells of a call that was left in its own time."""
    async with asyncio.timeout(PATIENCE_S):
        while places._num_calls:
            assert (await http.ask("/live")).status == 200


async def test_calls_of_both_protocols_end(start_http) -> None:
    """Whole answers, a stream that its client leaves, and what is not there."""
    security = Security()
    async with start_http(security=security) as http:
        whole = await http.complete(prompt="a", max_tokens=2)
        lost = await http.ask("/nothing")
        assert (whole.status, lost.status) == (200, 404)
        async with Client(http.running.address) as client:
            await client.info()
            async for _ in client.generate("a", max_tokens=4000):
                break
        async with grpc.aio.insecure_channel(http.running.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/no.Such/Method")(b"")
        assert security.places._let_in
        await until_idle(http, security.places)
