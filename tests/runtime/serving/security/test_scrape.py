"""The metrics' listener: its own address, the same credentials, text 0.0.4 for everybody."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.factory import ServeOptions
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.process import open_security
from outrider.runtime.serving.security import scrape
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.scrape import MetricsListener
from outrider.runtime.serving.settings import WatchOptions
from prometheus_client import CollectorRegistry, Counter

from tests.runtime.serving.security.credentials import Authority, bearer, key_security, write
from tests.runtime.serving.security.test_tls import AUTHORITY, mutual, server_files
from tests.runtime.serving.test_tenant import address_elsewhere

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}


@pytest.fixture(autouse=True)
def close_at_once(monkeypatch) -> None:
    monkeypatch.setattr(scrape, "POLL_S", 0.01)


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


@contextmanager
def listening(
    security: Security, address: str = "127.0.0.1:0", **options: Any
) -> Iterator[MetricsListener]:
    registry = CollectorRegistry()
    Counter("things", "Counted", registry=registry).inc(3)
    listener = MetricsListener(address, registry, security, **options)
    try:
        yield listener
    finally:
        listener.close()


def get(
    connection: http.client.HTTPConnection, headers: Mapping[str, str] = {}, method: str = "GET"
) -> tuple[int, str | None, str]:
    """Ask once; return status, content type and body."""
    try:
        connection.request(method, "/metrics", headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def at(listener: MetricsListener, host: str = "127.0.0.1") -> http.client.HTTPConnection:
    return http.client.HTTPConnection(host, listener.port, timeout=20)


def test_a_scrape_is_text_of_the_old_format_whatever_is_accepted():
    with listening(Security()) as listener:
        for headers in ({}, OPENMETRICS):
            code, content_type, body = get(at(listener), headers)
            assert (code, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert "\nthings_total 3.0\n" in body and "# EOF" not in body


def test_a_scraper_needs_a_key_with_the_scope(tmp_path: Path):
    security, keys = key_security(tmp_path)
    refused: list[str] = []
    with listening(security, refused=lambda error: refused.append(error.reason)) as listener:
        wrong = [get(at(listener), one) for one in ({}, bearer("x"), {"authorization": "Basic x"})]
        assert set(wrong) == {
            (401, "text/plain; charset=utf-8", "valid credentials are required\n")
        }
        code, _, body = get(at(listener), bearer(keys["x"]))
        assert code == 403 and "things" not in body
        assert get(at(listener), bearer(keys["scraper"]))[0] == 200
    assert refused == ["UNAUTHENTICATED"] * 3 + ["PERMISSION_DENIED"]


def test_a_port_that_the_system_chose_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "outrider")
    options = ServeOptions(watch=WatchOptions(metrics_address="127.0.0.1:0"))
    _, _, listener = open_security(tmp_path, options, Metrics())
    assert listener is not None
    listener.close()
    assert f"metrics on port {listener.port}" in caplog.text


@pytest.mark.parametrize("method", ["POST", "HEAD", "OPTIONS", "PUT", "TRACE", "NONSENSE"])
def test_nothing_but_a_scrape_is_answered(tmp_path: Path, method):
    security, _ = key_security(tmp_path)
    with listening(security) as listener:
        assert get(at(listener), {}, method)[::2] == (501, "")


def test_a_socket_of_its_own(tmp_path: Path):
    path = tmp_path / "metrics.sock"
    with listening(Security(), f"unix:{path}") as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and listener.port == 0
        assert get(UnixConnection(str(path)))[0] == 200
        with pytest.raises(ConfigError, match="metrics_address: must be free"):
            MetricsListener(f"unix:{path}", CollectorRegistry(), Security())
    assert not path.exists()


def test_an_address_that_is_taken_or_needs_tls_is_refused():
    with listening(Security()) as listener:
        for address, said in (
            (f"127.0.0.1:{listener.port}", "must be free to bind"),
            ("0.0.0.0:0", "needs tls_certificate"),
            ("nonsense", "must be HOST:PORT or unix:PATH|needs tls_certificate"),
            ("127.0.0.1:x", "must be HOST:PORT or unix:PATH"),
        ):
            with pytest.raises(ConfigError, match=f"metrics_address: .*({said})"):
                MetricsListener(address, CollectorRegistry(), Security())


def secure(
    listener: MetricsListener,
    host: str,
    *names: str,
    authority: Authority = AUTHORITY,
    folder: Path,
) -> http.client.HTTPSConnection:
    """A connection that trusts the authority, to an address of this machine that others reach."""
    context = ssl.create_default_context(cadata=AUTHORITY.pem.decode())
    context.check_hostname = False
    if names:
        chain, key = authority.certificate(*names)
        context.load_cert_chain(write(folder / "mine.pem", chain), write(folder / "mine.key", key))
    return http.client.HTTPSConnection(host, listener.port, timeout=20, context=context)


def test_where_others_reach_it_there_is_tls_whose_certificate_is_swapped(tmp_path: Path):
    host = address_elsewhere()
    security = Security(server_files(tmp_path))
    with listening(security, f"{host}:0") as listener:
        seen = set()
        for _ in range(2):
            connection = secure(listener, host, folder=tmp_path)
            connection.connect()
            seen.add(connection.sock.getpeercert(binary_form=True))
            assert get(connection)[0] == 200
            server_files(tmp_path)
            security.look()
        assert len(seen) == 2
        with pytest.raises((http.client.HTTPException, OSError)):
            get(at(listener, host))


def test_a_scraper_is_who_its_certificate_says(tmp_path: Path):
    host = address_elsewhere()
    options = mutual(tmp_path)
    write(tmp_path / "tenants.toml", '[tenants.ops]\ncertificates = ["ops"]\nscopes = ["metrics"]')
    with listening(Security(options), f"{host}:0") as listener:
        assert get(secure(listener, host, "ops", folder=tmp_path))[0] == 200
        assert get(secure(listener, host, "web", folder=tmp_path))[0] == 401
        for names, authority in (((), AUTHORITY), (("ops",), Authority())):
            with pytest.raises(OSError):
                get(secure(listener, host, *names, authority=authority, folder=tmp_path))


def test_connections_that_say_nothing_are_bounded_and_end(monkeypatch):
    monkeypatch.setattr(scrape, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(scrape, "PATIENCE_S", 0.2)
    with listening(Security()) as listener:
        silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
        for one in silent:
            one.settimeout(20)
            assert one.recv(1) == b""
            one.close()
        assert threading.active_count() < 12
        assert get(at(listener))[0] == 200


@pytest.mark.parametrize("has_tls", [False, True])
def test_who_sends_a_letter_now_and_then_keeps_no_place(has_tls, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(scrape, "PATIENCE_S", 600.0)
    monkeypatch.setattr(scrape, "MOST_S", 0.2)
    host = address_elsewhere() if has_tls else "127.0.0.1"
    security = Security(server_files(tmp_path)) if has_tls else Security()
    with (
        listening(security, f"{host}:0") as listener,
        socket.create_connection((host, listener.port), timeout=20) as slow,
    ):
        slow.sendall(b"\x16" if has_tls else b"G")
        # The end of the connection, or a reset where something was unread.
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
