"""The listener of metrics and probes: its own address, the same credentials, text 0.0.4 for everybody."""

from __future__ import annotations

import http.client
import socket
import ssl
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.http import connections, factory, protocol
from outrider.runtime.serving.http.factory import PortListener, open_metrics
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.server import Server

from tests.runtime.serving.security.credentials import Authority, bearer, key_security, write
from tests.runtime.serving.security.metrics_listener import (
    OPENMETRICS,
    UnixConnection,
    at,
    get,
    listening,
    things,
)
from tests.runtime.serving.security.test_tls import AUTHORITY, mutual, server_files
from tests.runtime.serving.test_tenant import address_elsewhere


def test_a_scrape_is_text_of_the_old_format_whatever_is_accepted():
    with listening(Security()) as listener:
        for headers in ({}, OPENMETRICS):
            code, content_type, body = get(at(listener), headers)
            assert (code, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert "\nthings_total 3.0\n" in body and "# EOF" not in body


def test_a_scraper_needs_a_key_with_the_scope(tmp_path: Path):
    security, keys = key_security(tmp_path)
    metrics = Metrics()
    with listening(security, metrics=metrics) as listener:
        for wrong in ({}, bearer("x"), {"authorization": "Basic x"}):
            code, _, body = get(at(listener), wrong)
            assert code == 401 and "valid credentials are required" in body
        code, _, body = get(at(listener), bearer(keys["x"]))
        assert code == 403 and "things" not in body
        assert get(at(listener), bearer(keys["scraper"]))[0] == 200
    counted = {
        sample.labels["reason"]: sample.value
        for family in metrics.refused.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert counted["UNAUTHENTICATED"] == 3 and counted["PERMISSION_DENIED"] == 1


def test_probes_are_answered_there_without_credentials(tmp_path: Path):
    security, _ = key_security(tmp_path)
    with listening(security) as listener:
        assert get(at(listener), path="/live")[0] == 200
        # The model is not open yet.
        assert get(at(listener), path="/health")[0] == 503
    security, keys = key_security(tmp_path, has_open_health=False)
    with listening(security) as listener:
        assert get(at(listener), path="/live")[0] == 401
        assert get(at(listener), bearer(keys["x"]), path="/live")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/metrics", 405), ("GET", "/v1/models", 404), ("POST", "/v1/completions", 404)],
)
def test_nothing_else_is_answered(tmp_path: Path, method, path, code):
    security, keys = key_security(tmp_path)
    with listening(security) as listener:
        assert get(at(listener), {}, method, path)[0] == 401
        assert get(at(listener), bearer(keys["scraper"]), method, path)[0] == code


def test_a_socket_of_its_own(tmp_path: Path):
    path = tmp_path / "metrics.sock"
    with listening(Security(), f"unix:{path}") as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and listener.port == 0
        assert get(UnixConnection(str(path)))[0] == 200
        with (
            pytest.raises(ConfigError, match="metrics_address: must be free"),
            listening(Security(), f"unix:{path}"),
        ):
            pass
    assert not path.exists()


def test_an_address_that_is_taken_or_needs_tls_is_refused():
    with listening(Security()) as listener:
        for address, said in (
            (f"127.0.0.1:{listener.port}", "must be free to bind"),
            ("0.0.0.0:0", "needs tls_certificate"),
            ("nonsense", "must be HOST:PORT or unix:PATH|needs tls_certificate"),
            ("127.0.0.1:x", "must be HOST:PORT or unix:PATH"),
        ):
            with (
                pytest.raises(ConfigError, match=f"metrics_address: .*({said})"),
                listening(Security(), address),
            ):
                pass


def secure(
    listener: PortListener,
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
    monkeypatch.setattr(factory, "METRICS_CONNECTIONS", 2)
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.2)
    with listening(Security()) as listener:
        silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
        for one in silent:
            one.settimeout(20)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
            one.close()
        assert get(at(listener))[0] == 200


@pytest.mark.parametrize("has_tls", [False, True])
def test_who_sends_a_letter_now_and_then_keeps_no_place(has_tls, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.2)
    monkeypatch.setattr(connections, "PATIENCE_S", 0.2)
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


async def test_a_listener_that_did_not_bind_removes_nothing(tmp_path: Path):
    path = tmp_path / "data"
    state = ServerState(RequestAccounting(Metrics(), time.monotonic))
    with socket.socket(socket.AF_UNIX) as other:
        for prepare in (
            lambda: path.write_text("mine"),
            lambda: (path.unlink(), other.bind(str(path)), other.listen()),
        ):
            prepare()
            listener = open_metrics(state, Security(), f"unix:{path}", things())
            assert listener is not None
            server = Server(state, ServerConfig(), RequestLimits(), listeners=[listener])
            with pytest.raises(ConfigError, match="metrics_address: must be free"):
                await server.listen("127.0.0.1:0")
            assert path.exists()


def test_a_place_is_free_again_behind_every_answer():
    with listening(Security()) as listener:
        connection = at(listener)
        connection.request("GET", "/live")
        connection.getresponse().read()
        assert connection.sock is None or connection.sock.recv(1) == b""
        connection.close()
