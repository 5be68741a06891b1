"""Header bombs at 512 connections: how much memory a server takes for headers that are long, packed or without an end.

python -m scripts.lab.soak.headers BUNDLE
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from outrider import Client
from outrider.runtime.serving.supervision.memory import GIVE_BACK_EVERY_S

from scripts.lab.soak.server import running_server
from scripts.lab.soak.verdict import MIB, finish, resident_mib
from tests.http2 import PREFACE, SETTINGS, frame, long_headers, repeated_headers

GREETING = PREFACE + frame(SETTINGS)
PATH = b"/outrider.v1.Inference/Generate"
GET = b"GET /live HTTP/1.1\r\nhost: a\r\n"
GRPC_BOMBS = {
    "gRPC, 1 MiB without an end": GREETING + long_headers(PATH, MIB),
    "gRPC, packed 1 MiB": GREETING + repeated_headers(PATH, MIB),
}
HTTP_BOMBS = {
    "HTTP, a value of 1 MiB": GET + b"x: " + b"a" * MIB,
    "HTTP, 1 MiB of headers": GET + b"x: a\r\n" * (MIB // 6),
    "HTTP, as much as is kept": GET + b"x: " + b"a" * (15 << 10),
}
MOST_MIB = 64.0
HELD_S, SETTLE_S = 3.0, 3 * GIVE_BACK_EVERY_S


async def hold(port: int, number: int, bomb: bytes, is_over: asyncio.Event) -> None:
    """Send a bomb on a connection of one of 64 addresses, and hold it."""
    try:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=(f"127.0.1.{number % 64 + 1}", 0)
        )
        writer.write(bomb)
        await is_over.wait()
        writer.transport.abort()
    except OSError:  # the server has ended it
        await is_over.wait()


async def peak_mib(pid: int, port: int, bomb: bytes, num: int) -> tuple[float, float]:
    """Return by how many MiB a process grows at most while so many connections hold a bomb, and what it keeps."""
    before, most, is_over = resident_mib(pid), 0.0, asyncio.Event()
    holders = [asyncio.ensure_future(hold(port, n, bomb, is_over)) for n in range(num)]
    until = asyncio.get_running_loop().time() + HELD_S
    while asyncio.get_running_loop().time() < until:
        most = max(most, resident_mib(pid))
        await asyncio.sleep(0.01)
    is_over.set()
    await asyncio.gather(*holders)
    await asyncio.sleep(SETTLE_S)
    return most - before, resident_mib(pid) - before


async def measure(
    address: str, pid: int, http_port: int, num: int
) -> dict[str, tuple[float, float]]:
    """Return the growth under each bomb, which leaves the server able to answer."""
    found = dict[str, tuple[float, float]]()
    async with Client(address) as client:
        for bombs, port in (
            (GRPC_BOMBS, int(address.rsplit(":", 1)[1])),
            (HTTP_BOMBS, http_port),
        ):
            for name, bomb in bombs.items():
                await client.wait_ready(timeout_s=60)
                _ = [one async for one in client.generate("a", max_tokens=1, timeout_s=60)]
                found[name] = await peak_mib(pid, port, bomb, num)
    return found


def main(bundle: Path, connections: int = 512, http_port: int = 8197) -> None:
    """Print the growth under each bomb, and exit 1 where one takes 64 MiB."""
    with running_server(bundle, "--http-port", str(http_port)) as server:
        found = asyncio.run(measure(server.address, server.pid, http_port, connections))
    problems = [f"{name}: {mib:.0f} MiB" for name, (mib, _) in found.items() if mib >= MOST_MIB]
    figures = {
        f"{name}, MiB at once and after": f"{a:.1f} {b:.1f}" for name, (a, b) in found.items()
    }
    finish("headers", figures, problems)


if __name__ == "__main__":
    typer.run(main)
