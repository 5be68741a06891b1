"""How answers over HTTP end that do not end well: clients that leave or do not read, deadlines, drains, failures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.http import body, protocol
from outrider.runtime.serving.http.openai import completions

from tests.runtime.conftest import ENDLESS_TOKENS
from tests.runtime.serving.test_status import HEALTH_BLIND, PATIENCE_S

AT_ONCE = {"lb_delay_s": 0.0, "drain_timeout_s": 0.0}
ENDLESS = {"prompt": "a", "max_tokens": ENDLESS_TOKENS - 1, "temperature": 0}
PLAIN = {"speculation": {"enabled": False}}
SHORT = {"prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def start_endless(start_http):
    def begin(
        *, config: ServerConfig | None = None, limits: RequestLimits | None = None, **more: Any
    ) -> Any:
        unsent = more.pop("max_unsent_chunks", ENDLESS_TOKENS)
        return start_http(
            config=replace(config or ServerConfig(**AT_ONCE), max_unsent_chunks=unsent),
            limits=replace(limits or RequestLimits(), max_tokens=ENDLESS_TOKENS),
            max_context=ENDLESS_TOKENS,
            **more,
        )

    return begin


@asynccontextmanager
async def sent(http: Any, *lines: str, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """The connection of a request; it is closed at the end."""
    data = json.dumps(fields).encode()
    header = ["POST /v1/completions HTTP/1.1", "host: localhost", f"content-length: {len(data)}"]
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write("\r\n".join([*header, *lines, "", ""]).encode() + data)
    try:
        yield reader
    finally:
        writer.close()


@asynccontextmanager
async def streaming(http: Any, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A stream whose first chunk has come."""
    async with sent(http, **ENDLESS, **PLAIN, stream=True, **fields) as reader:
        await reader.readuntil(b'"text"')
        yield reader


async def until(http: Any, **expected: int) -> None:
    """Return once the server's load is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            load = (await http.running.client.info()).load
            if all(getattr(load, name) == value for name, value in expected.items()):
                return


async def test_a_client_that_goes_away_frees_its_slot(start_endless):
    async with start_endless(max_batch=1) as http:
        async with streaming(http):
            pass
        assert (await http.complete(**SHORT)).json()["choices"][0]["text"] == "bcd"
        # A whole answer, of which nothing was sent.
        async with sent(http, **ENDLESS, **PLAIN):
            await until(http, num_running=1)
        assert (await http.complete(**SHORT)).status == 200
        count = http.running.server.metrics.registry.get_sample_value
        ended = {"code": "CANCELLED", "reason": "CLIENT_CANCELLED"}
        assert count("outrider_requests_finished_total", ended) == 2.0


async def test_a_client_that_goes_away_while_queued_leaves_the_queue(start_endless):
    async with start_endless(max_batch=1) as http, streaming(http):
        for streams in (True, False):
            async with sent(http, **SHORT, stream=streams):
                await until(http, num_queued=1)
            await until(http, num_queued=0)
        await until(http, num_running=1)


async def test_comments_keep_the_connection_of_who_waits(start_endless, monkeypatch):
    monkeypatch.setattr(completions, "PING_S", 0.05)
    async with start_endless(max_batch=1) as http, streaming(http):
        async with sent(http, **SHORT, stream=True) as waiting:
            header = await waiting.readuntil(b": ping\n\n")
            await waiting.readuntil(b": ping\n\n")
            assert header.startswith(b"HTTP/1.1 200")
        await until(http, num_queued=0)


async def test_a_client_that_does_not_read_is_cut_off(start_endless):
    options = {"max_unsent_chunks": 8, "stall_timeout_s": 0.2, "max_batch": 1}
    async with start_endless(**options) as http:
        more = {"logprobs": 20, "return_trace": True, "return_provenance": True}
        async with streaming(http, **more) as unread:
            # Nobody reads it; the only slot must come back all the same.
            assert (await http.complete(**SHORT)).json()["choices"][0]["text"] == "bcd"
            # What is left ends without the mark of a body's end.
            assert not (await unread.read()).endswith(b"0\r\n\r\n")
        count = http.running.server.metrics.registry.get_sample_value
        ended = {"code": "RESOURCE_EXHAUSTED", "reason": "SLOW_CONSUMER"}
        assert count("outrider_requests_finished_total", ended) == 1.0


async def test_a_deadline_ends_a_whole_answer(start_endless):
    async with start_endless() as http:
        whole = await http.ask("/v1/completions", ENDLESS | PLAIN, x_request_timeout_ms="100")
        refused = await http.ask("/v1/completions", SHORT, x_request_timeout_ms="soon")
        hopeless = await http.ask("/v1/completions", SHORT, x_request_timeout_ms="0")
    assert (whole.status, whole.error["code"]) == (504, "deadline")
    assert whole.headers["x-should-retry"] == "false"
    assert (refused.status, refused.error["param"]) == (400, "x-request-timeout-ms")
    assert (hopeless.status, hopeless.error["code"]) == (504, "hopeless")
    assert "x-should-retry" not in hopeless.headers


async def test_a_deadline_is_the_last_event_of_a_stream(start_endless):
    now_s = [0.0]
    lines = ("x-request-timeout-ms: 1000", "connection: close")
    async with (
        start_endless(clock=lambda: now_s[0]) as http,
        sent(http, *lines, **ENDLESS, **PLAIN, stream=True) as reader,
    ):
        await reader.readuntil(b'"text"')
        now_s[0] = 2.0
        rest = await reader.read()
    assert b'data: {"error":{' in rest and b'"code":"deadline"' in rest
    # Nothing says that all is done, but for the body's end.
    assert b"[DONE]" not in rest and rest.endswith(b"0\r\n\r\n")


async def test_a_full_queue_says_when_to_come_back(start_endless):
    config = ServerConfig(max_queued=0, retry_after_s=2.5, **AT_ONCE)
    async with start_endless(config=config, max_batch=1) as http, streaming(http):
        answer = await http.complete(**SHORT, stream=True)
        several = await http.complete(**SHORT | {"prompt": ["a", "b"]})
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_exceeded")
    assert answer.headers["retry-after-ms"] == "2500"
    assert several.status == 429


async def test_other_models_and_ids_in_flight_are_refused(start_endless):
    async with start_endless() as http, streaming(http, request_id="x"):
        other = await http.complete(**SHORT, model="other")
        twice = await http.complete(**SHORT, request_id="x")
        named = await http.complete(**SHORT, model="letters", request_id="y")
    assert (other.status, other.error["code"]) == (404, "model_not_found")
    assert other.error["type"] == "NotFoundError"
    # 409 would be tried again.
    assert (twice.status, twice.error["code"]) == (400, "duplicate_request_id")
    assert named.json()["id"] == "cmpl-y" and named.headers["x-request-id"] == "y"


async def test_an_engine_failure_has_an_id_and_is_not_to_be_tried_again(start_http, caplog):
    caplog.set_level(logging.CRITICAL)
    async with start_http(failing_extends=[0, 1, 2, 3, 4, 5]) as http:
        answer = await http.complete(**SHORT)
        several = await http.complete(**SHORT | {"prompt": ["a", "b"]})
    assert (answer.status, answer.error["type"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"
    assert "error id" in answer.error["message"]
    assert several.status == 500


async def test_a_bug_is_internal_with_an_id_and_without_its_text(start_http, caplog):
    caplog.set_level(logging.CRITICAL)
    async with start_http() as http:
        # The codec of these tests knows no digits and raises ValueError with the text.
        answer = await http.complete(prompt="secret 7")
        tokens = await http.ask("/tokenize", {"prompt": "secret 7"})
    for found in (answer, tokens):
        assert (found.status, found.error["code"]) == (500, "internal")
        assert b"substring" not in found.body


async def test_a_drain_refuses_new_requests_and_ends_the_others(start_endless):
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=PATIENCE_S)
    async with (
        start_endless(config=config, options=HEALTH_BLIND) as http,
        streaming(http) as running,
    ):
        drained = asyncio.ensure_future(http.running.server.drain())
        await until(http, is_draining=True)
        refused = await http.complete(**SHORT)
        health, live = await http.ask("/health"), await http.ask("/live")
        http.running.server.hurry()
        rest = await running.read()
        await drained
        with pytest.raises(OSError):
            await http.complete(**SHORT)
    assert (refused.status, refused.error["code"]) == (503, "draining")
    assert refused.headers["retry-after-ms"] == "1000"
    assert (health.status, health.error["code"], live.status) == (503, "draining", 200)
    assert b'"code":"drain_deadline"' in rest and b"[DONE]" not in rest


async def test_who_does_not_say_what_he_wants_is_let_go(start_http, monkeypatch):
    async with start_http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "PATIENCE_S", 0.05)
            for data in (b"", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                writer.write(data)
                assert await reader.read() == b""
                writer.close()
        monkeypatch.setattr(body, "PATIENCE_S", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        assert b"must arrive within" in await reader.read()
        writer.close()


async def test_connections_beyond_the_limit_are_closed(start_http):
    async with start_http(config=ServerConfig(max_connections=2, **AT_ONCE)) as http:
        first = await asyncio.open_connection("127.0.0.1", http.port)
        second = await asyncio.open_connection("127.0.0.1", http.port)
        third = await asyncio.open_connection("127.0.0.1", http.port)
        with pytest.raises(ConnectionError):
            if await third[0].read() == b"":
                raise ConnectionResetError
        for _, writer in (first, second, third):
            writer.close()
