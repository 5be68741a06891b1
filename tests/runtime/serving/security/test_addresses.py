"""Addresses: which need TLS, and sockets that are their owner's."""

from __future__ import annotations

import contextlib
import logging
import socket
import stat
from pathlib import Path

import pytest
from outrider import Client
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.access import REMIND_EVERY_S, Security
from outrider.runtime.serving.security.addresses import is_reachable, split_address, tcp_address
from outrider.runtime.serving.security.options import SecurityOptions

LOCAL = ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1", "::1:1", "unix:/run/o.sock"]
REACHABLE = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", ":1", "localhost.org:1", "*:1"]


@pytest.mark.parametrize("address", [*LOCAL, *REACHABLE])
def test_only_addresses_of_this_machine_need_no_tls(address, caplog):
    assert is_reachable(address) == (address in REACHABLE)
    if address in LOCAL:
        Security().check("host", address)
        return
    with pytest.raises(ConfigError, match=r"host: .*--insecure"):
        Security().check("host", address)
    Security(SecurityOptions(is_insecure=True)).check("host", address)


def test_without_tls_the_log_says_so_every_hour(caplog):
    security = Security(SecurityOptions(is_insecure=True))
    with caplog.at_level(logging.WARNING):
        security.check("host", "127.0.0.1:1")
        security.remind(0.0)
        assert not caplog.records
        security.check("host", "0.0.0.0:50051")
        for now_s in (0.0, 1.0, REMIND_EVERY_S - 1, REMIND_EVERY_S, 2 * REMIND_EVERY_S):
            security.remind(now_s)
    assert [one.message.count("0.0.0.0:50051") for one in caplog.records] == [1, 1, 1]


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("[::1]:65535", ("::1", 65535)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)
def test_an_address_has_a_host_and_a_port(address, parts):
    assert split_address("option", address) == parts
    assert tcp_address(*parts) == address


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:b", "a:65536", "a:-1", "a:" + "9" * 9])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="option: must be HOST:PORT or unix:PATH"):
        split_address("option", address)


async def test_a_socket_is_its_owners_and_goes_with_the_server(start, tmp_path: Path):
    path = tmp_path / "outrider.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with start(addresses=[f"unix:{path}"]) as run, Client(f"unix:{path}") as beside:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for client in (run.client, beside):
            assert (await client.info()).model == "letters"
    assert not path.exists()


async def test_a_socket_that_somebody_listens_on_is_not_taken_over(start, tmp_path: Path):
    path = tmp_path / "outrider.sock"
    async with start(addresses=[f"unix:{path}"]), contextlib.AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="uds: must be free to bind"):
            await stack.enter_async_context(start(addresses=[f"unix:{path}"]))
        async with Client(f"unix:{path}") as client:
            assert (await client.info()).model == "letters"


@pytest.mark.parametrize(
    ("name", "said"),
    [("file", "must be free to bind"), ("none/x", "in a folder"), ("x" * 200, "at most 107 bytes")],
)
async def test_a_socket_that_cannot_be_is_refused(start, tmp_path: Path, name, said):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"uds: must be .*{said}|uds: {said}"):
        async with start(addresses=[f"unix:{tmp_path / name}"]):
            pass
    assert (tmp_path / "file").exists()
