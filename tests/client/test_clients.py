"""Both clients against a server in this process: whole answers, metadata, interceptors, errors, cancellation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from outrider import (
    CallCancelled,
    Client,
    DeadlineExceeded,
    RequestRefused,
    SamplingParams,
    SyncClient,
)
from outrider.errors import CallError

from tests.runtime.conftest import ENDLESS_TOKENS

ROOT = Path(__file__).parents[2]
ENDLESS = SamplingParams(
    max_tokens=ENDLESS_TOKENS - 1, temperature=0.0, speculation={"enabled": False}
)
# Seconds until a condition that never comes true fails its test; any machine needs far less.
PATIENCE_S = 60
T = TypeVar("T")


async def called(address: str, call: Callable[[SyncClient], T], **options: Any) -> T:
    """Run a program that blocks in a thread of its own: the server is on this one's loop."""

    def program() -> T:
        with SyncClient(address, **options) as client:
            return call(client)

    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.to_thread(program)


async def wait_until_idle(client: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await client.info()).load.num_running:
            pass


async def test_a_whole_answer_is_one_value(start):
    async with start() as run:
        output = await run.client.complete("abc", max_tokens=4, temperature=0.0, logprobs=0)
    (only,) = output.outputs
    assert (output.text, only.token_ids, only.finish_reason) == ("defg", [3, 4, 5, 6], "length")
    assert output.prompt == "abc"
    assert (output.usage.prompt_tokens, output.usage.output_tokens) == (3, 4)
    assert only.logprobs is not None and [*map(list, only.logprobs)] == [[3], [4], [5], [6]]
    assert only.speculation is not None and only.speculation.drafter == "model"


async def test_metadata_of_a_call_is_beside_the_tenant_of_the_client_and_wins(start_endless):
    async with start_endless() as run, Client(run.address, tenant="own") as client:
        stream = client.generate(
            "a", request_id="x", metadata={"outrider-tenant": "other"}, **ENDLESS
        )
        await anext(stream)
        assert await client.abort("x", metadata={"more": "1"}) == []
        assert await client.abort("x", metadata={"outrider-tenant": "other"}) == ["x"]
        with pytest.raises(CallCancelled):
            async for _ in stream:
                pass


class Tenant(grpc.aio.UnaryStreamClientInterceptor):
    """Names a tenant in every stream."""

    async def intercept_unary_stream(self, continuation, details, request):
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("outrider-tenant", "named"))
        return await continuation(details._replace(metadata=metadata), request)


async def test_interceptors_are_around_calls_of_the_async_client(start_endless):
    async with start_endless() as run, Client(run.address, interceptors=[Tenant()]) as client:
        stream = client.generate("a", request_id="x", **ENDLESS)
        await anext(stream)
        assert await run.client.abort("x") == []
        await stream.aclose()
        await wait_until_idle(run.client)
        with pytest.raises(RequestRefused):
            await client.complete("a", temperature=9.0)


class SyncTenant(grpc.UnaryStreamClientInterceptor):
    """Likewise."""

    def intercept_unary_stream(self, continuation, details, request):
        metadata = (*(details.metadata or ()), ("outrider-tenant", "named"))
        return continuation(details._replace(metadata=metadata), request)


async def test_interceptors_are_around_calls_of_the_sync_client(start_endless):
    def program(client: SyncClient) -> list[str]:
        stream = client.generate("a", request_id="x", **ENDLESS)
        next(stream)
        aborted = client.abort("x")
        stream.close()
        return aborted

    async with start_endless() as run:
        assert await called(run.address, program, interceptors=[SyncTenant()]) == []
        await wait_until_idle(run.client)


class Generator(grpc.UnaryStreamClientInterceptor):
    """Gives a stream that is no call."""

    def intercept_unary_stream(self, continuation, details, request):
        yield from continuation(details, request)


async def test_an_interceptor_may_give_a_generator(start_endless):
    def program(client: SyncClient) -> str:
        client.wait_ready(timeout_s=PATIENCE_S)
        stream = client.generate("a", request_id="x", **ENDLESS)
        next(stream)
        stream.close()
        return client.complete("abc", max_tokens=2, temperature=0.0).text

    async with start_endless() as run:
        assert await called(run.address, program, interceptors=[Generator()])
        await wait_until_idle(run.client)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"Upper": "v"}, "key 'Upper' must be of lower case letters"),
        ({"a b": "v"}, "key 'a b' must"),
        ({"": "v"}, "key '' must"),
        ({"x": 5}, "value of 'x' must be printable ASCII text"),
        ({"x": "ü"}, "value of 'x' must be printable ASCII text"),
        ({"x-bin": "v"}, "value of 'x-bin' must be bytes"),
    ],
)
async def test_metadata_that_cannot_be_sent_is_named(metadata: Any, words: str):
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=words):
            await client.info(metadata=metadata)
        with pytest.raises(ValueError, match=words):
            await client.complete("a", metadata=metadata)
    with SyncClient("127.0.0.1:1") as blocking:
        with pytest.raises(ValueError, match=words):
            blocking.info(metadata=metadata)
        with pytest.raises(ValueError, match=words):
            blocking.complete("a", metadata=metadata)


async def test_a_closed_client_refuses_calls():
    client, blocking = Client("127.0.0.1:1"), SyncClient("127.0.0.1:1")
    await client.close()
    await client.close()
    blocking.close()
    blocking.close()
    for call in (client.info, client.wait_ready, lambda: client.complete("a")):
        with pytest.raises(RuntimeError, match="the client is closed"):
            await call()
    for program in (blocking.info, blocking.wait_ready, lambda: blocking.complete("a")):
        with pytest.raises(RuntimeError, match="the client is closed"):
            program()


def test_threads_with_loops_of_their_own_may_share_a_client():
    client, before = Client("127.0.0.1:1"), sys.getswitchinterval()

    async def connect() -> None:
        client._connection()

    def program(_: int) -> None:
        asyncio.run(connect())

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(program, range(200)))
    finally:
        sys.setswitchinterval(before)


async def test_the_sync_client_has_the_same_calls(start):
    def program(client: SyncClient) -> None:
        client.wait_ready(timeout_s=PATIENCE_S)
        assert client.info().model == "letters"
        assert client.tokenize("abc") == [0, 1, 2]
        output = client.complete([0, 1], max_tokens=3, temperature=0.0, timeout_s=PATIENCE_S)
        assert (output.text, output.prompt_token_ids) == ("cde", [0, 1])
        pieces = list(client.generate("abc", max_tokens=4, temperature=0.0))
        assert "".join(piece.text for piece in pieces) == "defg"
        assert pieces[-1].HasField("finish")
        with pytest.raises(RequestRefused) as caught:
            client.complete("a", temperature=9.0)
        assert caught.value.violations[0].field == "sampling.temperature"

    async with start() as run:
        await called(run.address, program)


async def test_leaving_the_loop_of_the_sync_client_cancels_the_request(start_endless):
    def program(client: SyncClient) -> None:
        for piece in client.generate("a", **ENDLESS):
            assert piece.tokens
            break

    async with start_endless() as run:
        await called(run.address, program)
        await wait_until_idle(run.client)


async def test_deadline_and_abort_end_streams_of_the_sync_client(start_endless):
    def ending(client: SyncClient, **options: Any) -> type[CallError]:
        with pytest.raises(CallError) as caught:
            client.complete("a", request_id="x", **ENDLESS, **options)
        return caught.type

    async with start_endless() as run:
        late = await called(run.address, lambda client: ending(client, timeout_s=0.2))
        assert late is DeadlineExceeded
        await wait_until_idle(run.client)
        running = asyncio.ensure_future(called(run.address, ending))
        async with asyncio.timeout(PATIENCE_S):
            while not await run.client.abort("x"):
                pass
        assert await running is CallCancelled


OUTSIDE = """
import asyncio, sys
from outrider import Client, SyncClient

client = Client(sys.argv[1])

async def main():
    await client.wait_ready(timeout_s=20)
    both = await asyncio.gather(*[client.complete("abc", max_tokens=4, temperature=0.0) for _ in "ab"])
    print([one.text for one in both])

asyncio.run(main())
asyncio.run(main())
with SyncClient(sys.argv[1]) as blocking:
    print(blocking.complete("abc", max_tokens=2, temperature=0.0).text)

async def close():
    await client.complete("abc", max_tokens=1)
    await client.close()

asyncio.run(close())
"""


async def test_a_client_made_outside_a_loop_serves_one_loop_after_the_other(start):
    async with start() as run:
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", OUTSIDE, run.address),
            env={**os.environ, "PYTHONPATH": str(ROOT / "proto")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await done.communicate()
    assert err.decode() == ""
    assert out.decode().splitlines() == ["['defg', 'defg']", "['defg', 'defg']", "de"]
