"""The audit log: a line of each request, whatever became of it, and nothing of what it said."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from outrider import CallError, Client
from outrider.runtime.core.errors import ConfigError, PermissionDenied, Unauthenticated
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.requests.client import ANONYMOUS, ClientIdentity
from outrider.runtime.serving.security import audit
from outrider.runtime.serving.security.audit import AuditEntry, AuditLog, host_of
from outrider.runtime.serving.tokenization import INLINE_TEXT

from tests.runtime.conftest import LetterCodec
from tests.runtime.markov import Clock
from tests.runtime.serving.security.credentials import bearer, key_security

ENTRY = AuditEntry(method="Generate", outcome="refused", code="UNAVAILABLE", reason="DRAINING")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def answer(client: Client, text: str, **options: Any) -> str:
    return "".join([chunk.text async for chunk in client.generate(text, **options)])


async def test_every_request_has_a_line_and_no_line_has_a_text(start, tmp_path: Path):
    path = tmp_path / "audit"
    security, keys = key_security(tmp_path)
    async with start(security=security, audit=AuditLog(path)) as run:
        told = {"metadata": bearer(keys["x"])}
        options = {"max_tokens": 5, "temperature": 0.0, "priority": 3}
        assert await answer(run.client, "secret", request_id="one", **options, **told) == "uvwxy"
        for text, more in (("secret", {"stop": ["secret"] * 99, **told}), ("secret", {})):
            with pytest.raises(CallError):
                await answer(run.client, text, **more)
        with pytest.raises(CallError):
            await answer(run.client, "secret", metadata=bearer(keys["scraper"]))
    admitted, invalid, unknown, denied = lines(path)
    assert admitted.pop("ms") > 0.0
    assert datetime.fromisoformat(admitted.pop("time")).tzinfo is not None
    assert admitted == {
        "method": "Generate",
        "outcome": "admitted",
        "tenant": "x",
        "key": "key:key-of-x",
        "peer": "127.0.0.1",
        "request_id": "one",
        "code": "OK",
        "reason": "length",
        "priority": 3,
        "prompt_tokens": 6,
        "output_tokens": 5,
        "not_written": 0,
    }
    reasons = [(one["outcome"], one["code"], one["reason"]) for one in (invalid, unknown, denied)]
    assert reasons == [
        ("refused", "INVALID_ARGUMENT", "INVALID_PARAMETER"),
        ("refused", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("refused", "PERMISSION_DENIED", "PERMISSION_DENIED"),
    ]
    assert [one["key"] for one in (invalid, unknown, denied)] == [
        "key:key-of-x",
        "",
        "key:key-of-scraper",
    ]
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text and not any(key in text for key in keys.values())


async def test_a_cancelled_request_is_written_down_as_such(start_endless, tmp_path: Path):
    path = tmp_path / "audit"
    async with start_endless(audit=AuditLog(path)) as run:
        stream = run.endless(request_id="mine")
        await anext(stream)
        assert await run.client.abort("mine") == ["mine"]
        with pytest.raises(CallError):
            async for _ in stream:
                pass
    (line,) = lines(path)
    assert (line["outcome"], line["code"], line["reason"]) == (
        "admitted",
        "CANCELLED",
        "ABORTED_BY_RPC",
    )
    assert line["output_tokens"] > 0


async def test_who_leaves_while_his_text_is_tokenised_has_a_line_too(start, tmp_path: Path):
    path, begun, go_on = tmp_path / "audit", threading.Event(), threading.Event()

    class Slow(LetterCodec):
        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            begun.set()
            assert go_on.wait(60)
            return super().encode(text[:1])

    async with start(audit=AuditLog(path), codec=Slow()) as run:
        answer = asyncio.ensure_future(anext(run.client.generate("a" * INLINE_TEXT, max_tokens=1)))
        assert await asyncio.to_thread(begun.wait, 60)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        # The server hears of it when it does.
        async with asyncio.timeout(60):
            while not path.read_text(encoding="utf-8"):
                await run.client.info()
        go_on.set()
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_requests_refused_total", {"reason": "CLIENT_CANCELLED"}) == 1.0
    (line,) = lines(path)
    assert (line["outcome"], line["code"]) == ("refused", "CANCELLED")


def test_only_the_owner_may_read_it_and_it_is_appended_to(tmp_path: Path):
    path = tmp_path / "audit"
    for _ in range(2):
        log = AuditLog(path, now=lambda: datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC))
        log.write(ENTRY)
        log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one["time"] for one in lines(path)] == ["2026-01-02T03:04:05.678Z"] * 2


@pytest.mark.parametrize(
    "take_away", [lambda path: path.rename(path.with_name("old")), Path.unlink]
)
def test_a_file_that_was_moved_is_begun_anew(tmp_path: Path, take_away: Callable[[Path], object]):
    path = tmp_path / "audit"
    log = AuditLog(path)
    log.write(ENTRY)
    log.flush()
    take_away(path)
    log.write(ENTRY)
    log.write(ENTRY)
    log.close()
    assert len(lines(path)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_strangers_fill_no_log(tmp_path: Path):
    """Ten lines of refused strangers a second, and then how many there were; who is known has all of his."""
    path, clock = tmp_path / "audit", Clock()
    accounting = RequestAccounting(Metrics(), clock, audit=AuditLog(path))
    for _ in range(2):
        for _ in range(1000):
            accounting.refused("Generate", ANONYMOUS, Unauthenticated())
        clock.now += 1.0
    for _ in range(20):
        accounting.refused("Generate", ClientIdentity(key="key:x"), PermissionDenied("scope"))
    accounting.refused("Generate", ANONYMOUS, PermissionDenied("scope"))
    assert accounting.audit is not None
    accounting.audit.close()
    found = lines(path)
    assert [line["not_written"] for line in found] == [0] * 10 + [990] + [0] * 29 + [990]
    count = accounting.metrics.registry.get_sample_value
    assert count("outrider_requests_refused_total", {"reason": "UNAUTHENTICATED"}) == 2000.0


def test_a_slow_disk_holds_nobody_up_and_has_a_bound(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(audit, "MOST_WAITING", 5)
    log, go_on = AuditLog(tmp_path / "audit"), threading.Event()
    log._thread.submit(go_on.wait, 60)
    for _ in range(9):
        log.write(ENTRY)
    go_on.set()
    log.flush()
    log.write(ENTRY)
    log.close()
    assert [line["not_written"] for line in lines(tmp_path / "audit")] == [0] * 5 + [4]
    assert caplog.text.count("its disk is too slow") == 1


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "audit").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="audit_log"):
        AuditLog(tmp_path / "audit")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="audit_log"):
        AuditLog(tmp_path / "nowhere" / "audit")


def test_where_it_cannot_be_written_requests_go_on_and_the_log_says_so_once(tmp_path: Path, caplog):
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AuditLog(folder / "audit")
    (folder / "audit").unlink()
    folder.rmdir()
    log.write(ENTRY)
    log.write(ENTRY)
    log.flush()
    assert caplog.text.count("the audit log cannot be written") == 1
    folder.mkdir()
    log.write(ENTRY)
    log.close()
    assert len(lines(folder / "audit")) == 1


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5000", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fd00::2]:5000", "fd00::2"),
        ("unix:/run/outrider.sock", "unix"),
        ("", ""),
    ],
)
def test_a_peer_has_no_port(peer: str, host: str):
    assert host_of(peer) == host
