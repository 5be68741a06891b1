"""TLS of the HTTP listener over real handshakes, and certificates and authorities that change while it serves."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
        # A certificate may say whose requests they are, too.
        assert (await asyncio.to_thread(ask, server.port, old))[0] == 200
        for stranger in (trust(tmp_path), trust(tmp_path, names, newer)):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await asyncio.to_thread(ask, server.port, stranger)
        write(tmp_path / "ca.pem", newer.pem, 0o644)
        security.look()
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await asyncio.to_thread(ask, server.port, old)
        fresh = trust(tmp_path, names, newer)
        assert (await asyncio.to_thread(lambda: ask(server.port, fresh, **key)))[0] == 200


async def test_a_client_is_who_its_certificate_says(start_http, tmp_path: Path):
    options = mutual(tmp_path)
    write(tmp_path / "tenants.toml", '[tenants.web]\ncertificates = ["web"]\nscopes = ["info"]')
    async with start_http(security=Security(options)) as server:
        for name, status in (("web", 200), ("stranger", 401)):
            context = trust(tmp_path, (name,))
            assert (await asyncio.to_thread(ask, server.port, context))[0] == status
            # A header decides where there is one.
            asked = partial(ask, server.port, context, authorization="Bearer wrong")
            assert (await asyncio.to_thread(asked))[0] == 401


async def test_no_session_outlives_the_authority_that_it_began_with(start_http, tmp_path: Path):
    security = Security(mutual(tmp_path))
    async with start_http(security=security) as server:
        context = trust(tmp_path, ("web",))
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose sessions need no tickets

        def shake(session: Any = None) -> tuple[Any, bool]:
            with (
                socket.create_connection(("localhost", server.port), timeout=20) as plain,
                context.wrap_socket(plain, server_hostname="localhost", session=session) as one,
            ):
                one.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                while one.recv(4096):
                    pass
                return one.session, bool(one.session_reused)

        session, _ = await asyncio.to_thread(shake)
        # Within the time of one authority a session is as good as its handshake.
        session, is_reused = await asyncio.to_thread(shake, session)
        assert is_reused
        write(tmp_path / "ca.pem", Authority().pem, 0o644)
        security.look()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake, session)
