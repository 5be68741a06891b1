"""TLS of the HTTP listener over real handshakes, and certificates and authorities that change while it serves."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.http.listener import HttpListener, HttpOptions
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security

from tests.runtime.serving.security.credentials import Authority, bearer, write, write_keys
from tests.runtime.serving.security.test_tls import AUTHORITY, mutual, server_files


def trust(folder: Path, names: tuple[str, ...] = (), authority: Authority = AUTHORITY) -> Any:
    """A context of a client that trusts the authority of the tests, with a certificate for names by ``authority``."""
    context = ssl.create_default_context(cadata=AUTHORITY.pem.decode())
    if names:
        chain, key = authority.certificate(*names)
        context.load_cert_chain(write(folder / "c.pem", chain), write(folder / "c.key", key))
    return context


def ask(port: int, context: Any, **headers: str) -> tuple[int, int]:
    """Return the status of a request, and the serial number of the server's certificate."""
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=20)
    try:
        connection.request("GET", "/v1/models", headers=headers)
        certificate = connection.sock.getpeercert()
        return connection.getresponse().status, int(certificate["serialNumber"], 16)
    finally:
        connection.close()


async def test_a_new_certificate_serves_the_next_handshake(start_http, tmp_path: Path):
    security = Security(server_files(tmp_path))
    async with start_http(security=security) as server:
        context = trust(tmp_path)
        status, first = await asyncio.to_thread(ask, server.port, context)
        assert status == 200
        assert (await asyncio.to_thread(ask, server.port, context))[1] == first
        server_files(tmp_path)
        security.look()
        # The very next one, and resumed sessions too.
        second = (await asyncio.to_thread(ask, server.port, context))[1]
        assert second != first
        (tmp_path / "key.pem").write_text("nonsense")
        security.look()
        assert (await asyncio.to_thread(ask, server.port, context))[1] == second
        with pytest.raises(http.client.BadStatusLine):
            await server.ask("/v1/models")


async def test_clients_need_a_certificate_of_an_authority_that_is_trusted_now(
    start_http, tmp_path: Path
):
    secrets = write_keys(tmp_path / "keys", x="generate,info")
    security = Security(mutual(tmp_path, keys=tmp_path / "keys"))
    names, newer = ("spiffe://acme/web",), Authority()
    async with start_http(security=security) as server:
        old = trust(tmp_path, names)
        key = bearer(secrets["x"])
        assert (await asyncio.to_thread(lambda: ask(server.port, old, **key)))[0] == 200
        # Here a certificate says nothing of whose requests they are.
        assert (await asyncio.to_thread(ask, server.port, old))[0] == 401
        for stranger in (trust(tmp_path), trust(tmp_path, names, newer)):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await asyncio.to_thread(ask, server.port, stranger)
        write(tmp_path / "ca.pem", newer.pem, 0o644)
        security.look()
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await asyncio.to_thread(ask, server.port, old)
        fresh = trust(tmp_path, names, newer)
        assert (await asyncio.to_thread(lambda: ask(server.port, fresh, **key)))[0] == 200


def test_certificates_alone_let_nobody_in_and_are_refused_at_the_start(tmp_path: Path) -> None:
    security = Security(mutual(tmp_path))
    options = HttpOptions(address="127.0.0.1:0", max_bytes=1, max_connections=1)
    with pytest.raises(ConfigError, match="http_address: needs keys or jwt_keys"):
        HttpListener(ServerState(RequestAccounting(Metrics(), lambda: 0.0)), security, options)
