"""Connections and header bombs: waves of both leave a server's memory where it was, and it serves on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from outrider import Client
from outrider.runtime.serving.memory import GIVE_BACK_EVERY_S

from scripts.soak.http2 import (
    PREFACE,
    SETTINGS,
    RawConnection,
    connect,
    frame,
    long_headers,
    repeated_headers,
)
from scripts.soak.server import running_server
from scripts.soak.verdict import MIB, finish, resident_mib

GREETING = PREFACE + frame(SETTINGS)
PATH = b"/outrider.v1.Inference/Generate"
MOST_GROWTH = 0.10
HELD_S, AT_ONCE = 2.0, 100
WAVES = {
    "connections": GREETING,
    "unfinished headers of 1 MiB": GREETING + long_headers(PATH, MIB),
    "packed headers of 1 MiB": GREETING + repeated_headers(PATH, MIB),
}


async def wave(address: str, first: bytes, count: int, held_s: float = HELD_S) -> int:
    """Open connections that each send ``first``, hold them, and drop them; the number that could be opened."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one() -> RawConnection | None:
        async with turns:
            return await connect(address, first)

    opened = [one for one in await asyncio.gather(*(one() for _ in range(count))) if one]
    await asyncio.sleep(held_s)
    for connection in opened:
        connection.close()
    return len(opened)


async def serves(address: str) -> bool:
    """Return whether a new client gets a token."""
    async with Client(address) as client:
        responses = [one async for one in client.generate("a", max_tokens=1, timeout_s=60)]
    return responses[-1].HasField("finish")


async def settled_mib(pid: int) -> float:
    """Return a process's resident memory once it has stopped falling for two turns, or after a minute."""
    lowest, since = resident_mib(pid), 0
    for _ in range(round(60.0 / GIVE_BACK_EVERY_S)):
        await asyncio.sleep(GIVE_BACK_EVERY_S)
        now = resident_mib(pid)
        since = 0 if now < 0.99 * lowest else since + 1
        lowest = min(lowest, now)
        if since == 2:
            break
    return resident_mib(pid)


async def attack(
    address: str, pid: int, counts: dict[str, int]
) -> tuple[dict[str, str], list[str]]:
    """Send every wave twice; the figures, and what is wrong."""
    await serves(address)
    before = await settled_mib(pid)
    figures, problems = {"MiB before": f"{before:.1f}"}, list[str]()
    for name, count in counts.items():
        for number in (1, 2):
            num_opened = await wave(address, WAVES[name], count)
            held = resident_mib(pid)
            if not await serves(address):
                problems.append(f"no answer after {name}, wave {number}")
            after = await settled_mib(pid)
            figures[f"MiB after {num_opened} x {name}, wave {number}"] = (
                f"{after:.1f} ({held:.1f} at once)"
            )
            if after > (1.0 + MOST_GROWTH) * before:
                problems.append(f"{name}: from {before:.1f} to {after:.1f} MiB")
    return figures, problems


def main(
    bundle: Path,
    connections: int = 5000,
    bombs: Annotated[int, typer.Option(help="of each kind")] = 400,
) -> None:
    """Send waves to a server process of BUNDLE, and exit 1 where its memory grows by more than a tenth."""
    counts = dict.fromkeys(WAVES, bombs) | {"connections": connections}
    with running_server(bundle, "--gamma", "4") as server:
        figures, problems = asyncio.run(attack(server.address, server.pid, counts))
    finish("connections", figures, problems)


if __name__ == "__main__":
    typer.run(main)
