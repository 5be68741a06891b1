"""What strangers can hold or make the server do over HTTP, before anything is known of them or checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat.formats import NO_FORMAT
from outrider.runtime.serving.http import connections, listener, protocol
from outrider.runtime.serving.http.openai import messages
from outrider.runtime.serving.security.access import Security

from tests.runtime.serving.security.test_tls import server_files

LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def answer_to(port: int, data: bytes) -> bytes:
    """All that comes on a connection until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(10.0):
            return await reader.read()
    finally:
        writer.close()


async def test_few_requests_of_a_connection_wait(start_http):
    async with start_http() as http:
        few = LIVE * (protocol.MOST_PIPELINED + 1)
        last = LIVE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        assert (await answer_to(http.port, few[: -len(LIVE)] + last)).count(b"200 OK") == 17
        assert b"400 Bad Request" in await answer_to(http.port, LIVE * 2000)


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        LIVE[:-2],
        LIVE[:-2] + b"x: ",
        LIVE + LIVE[:-2] + b"x: ",
        LIVE.replace(b"GET", b"POST")[:-2] + b"transfer-encoding: chunked\r\n\r\n3;",
        LIVE.replace(b"GET", b"POST")[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["target", "name", "value", "second", "chunk", "trailer"],
)
async def test_what_never_ends_is_not_kept(start_http, begin: bytes):
    """The parser would keep a header for as long as it lasts, in quadratic time."""
    async with start_http() as http:
        _, writer = await asyncio.open_connection("127.0.0.1", http.port)
        num_bytes = 0
        with pytest.raises(OSError):
            while num_bytes < 64 << 20:
                writer.write(begin if not num_bytes else b"a" * 4096)
                await writer.drain()
                num_bytes += 4096
        # What sockets keep, too.
        assert num_bytes < 16 << 20


async def test_bytes_that_begin_no_request_keep_no_connection(start_http, monkeypatch):
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.2)
    async with start_http() as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(LIVE)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_is_never_the_next_request(start_http):
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    with_body = b"POST /live HTTP/1.1\r\nhost: localhost\r\n" + upgrade
    async with start_http() as http:
        found = await answer_to(
            http.port, with_body + b"content-length: %d\r\n\r\n" % len(LIVE) + LIVE
        )
    assert found.startswith(b"HTTP/1.1 400") and b"200 OK" not in found


async def test_who_reads_nothing_of_a_page_is_let_go(start_http, monkeypatch):
    monkeypatch.setattr(listener, "STALL_S", 0.0)
    ended = asyncio.Event()
    lost = protocol.BoundedProtocol.connection_lost

    def note(self: protocol.BoundedProtocol, error: Exception | None) -> None:
        lost(self, error)
        ended.set()

    monkeypatch.setattr(protocol.BoundedProtocol, "connection_lost", note)
    monkeypatch.setattr(protocol, "MOST_PIPELINED", 1000)
    page = LIVE.replace(b"/live", b"/uPlot-1.6.32.iife.min.js")
    async with start_http(stall_timeout_s=0.05) as http:
        _, writer = await asyncio.open_connection("127.0.0.1", http.port, limit=1024)
        writer.write(page * 300)  # 15 MB: more than sockets keep
        async with asyncio.timeout(10.0):
            await ended.wait()
        writer.close()


@pytest.mark.parametrize(("stall_timeout_s", "stall_s"), [(5.0, 60.0), (120.0, 240.0)])
def test_a_connection_outlasts_a_request_that_nobody_reads(stall_timeout_s, stall_s):
    options = listener.HttpOptions(address="", max_connections=1, stall_timeout_s=stall_timeout_s)
    made = listener._configuration(None, options).http
    assert made.stall_s == stall_s


async def test_handshakes_that_do_not_begin_are_counted_and_ended(
    start_http, monkeypatch, tmp_path: Path
):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    config = ServerConfig(max_connections=2, lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start_http(security=Security(server_files(tmp_path)), config=config) as http:
        opened = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(3)]
        async with asyncio.timeout(10.0):
            # The third at once, the others when nothing has come.
            assert await opened[2][0].read() == b""
            assert await opened[0][0].read() == b""
        for _, writer in opened:
            writer.close()


def test_lists_are_counted_before_they_are_looked_at():
    # Their entries would be refused, too.
    with pytest.raises(RequestError, match="at most 3"):
        messages.chat_of({"messages": [None] * 4}, 3, NO_FORMAT)


async def test_biases_are_counted_before_they_are_looked_at(start_http):
    limits = RequestLimits(max_logit_bias=1)
    async with start_http(limits=limits) as http:
        answer = await http.complete(prompt="a", logit_bias={"x": "y", "z": "y"})
    assert "at most 1 entries" in answer.error["message"]


async def test_long_options_are_not_copied_for_each_of_many_prompts(start_http):
    async with start_http() as http:
        answer = await http.complete(prompt=["a"] * 256, regex="a" * (1 << 20))
        assert "fewer prompts" in answer.error["message"]
        answer = await http.complete(prompt="a", regex="a" * (1 << 20))
        assert "at most 8192 bytes" in answer.error["message"]
