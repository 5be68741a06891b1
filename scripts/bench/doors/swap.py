"""Certificates that change while calls come in: how many calls fail."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

from outrider import Client
from outrider.errors import CallError

from scripts.bench.doors.certificates import Pair
from scripts.bench.doors.papers import Papers
from scripts.bench.tools.common import code_prompts
from scripts.bench.tools.results import Row
from scripts.soak.server import running_server

RELOAD_S = 0.2
_PATIENCE_S = 30.0
_AT_ONCE = 4
_MAX_TOKENS = 8


def swaps(bundle: Path, papers: Papers, num_swaps: int) -> list[Row]:
    """Return calls and failures while the server's certificate is replaced, each call over a connection of its own."""
    options = (*papers.options("tls"), "--gamma", "0", "--reload-every-s", str(RELOAD_S))
    with running_server(bundle, *options) as server:
        return [asyncio.run(_under_load(server.address, papers, num_swaps))]


async def _under_load(address: str, papers: Papers, num_swaps: int) -> Row:
    failures: list[CallError] = []
    num_calls, is_over = 0, asyncio.Event()
    (prompt,) = code_prompts(1, num_lines=3)

    async def call() -> None:
        nonlocal num_calls
        while not is_over.is_set():
            num_calls += 1
            # Connections of one address are shared within a process, unless their options differ.
            own = (("outrider.connection", num_calls),)
            async with Client(address, options=own, **papers.access("tls")) as client:
                try:
                    await client.complete(prompt, max_tokens=_MAX_TOKENS, timeout_s=_PATIENCE_S)
                except CallError as error:
                    failures.append(error)

    calls = [asyncio.create_task(call()) for _ in range(_AT_ONCE)]
    seen = {await asyncio.to_thread(shown, address, papers.authority.ca)}
    for number in range(num_swaps):
        replace(papers.server, papers.authority.issue(f"server-{number}"))
        before = len(seen)
        async with asyncio.timeout(_PATIENCE_S):
            while len(seen) == before:
                seen.add(await asyncio.to_thread(shown, address, papers.authority.ca))
                await asyncio.sleep(RELOAD_S / 4)
    is_over.set()
    await asyncio.gather(*calls)
    figures = {
        "certificates_seen": len(seen),
        "calls": num_calls,
        "failed": len(failures),
        "first_failure": str(failures[0]) if failures else None,
    }
    return Row(case={"figure": "certificate swap under load"}, figures=figures)


def shown(address: str, ca: Path) -> bytes:
    """Return the certificate that a server shows now, DER."""
    asked = ssl.create_default_context(cafile=str(ca))
    asked.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as plain,
        asked.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def replace(old: Pair, new: Pair) -> None:
    """Put a certificate and its key in the place of others, one file after the other, as administrators do."""
    new.key.replace(old.key)
    new.certificate.replace(old.certificate)
