"""What an engine in a process of its own costs: processor time per output token, against one process.

Both servers of a bundle answer the same greedy requests, in turns, so that what else the machine does meets both. The
time is that of all threads of a server's processes, engines included: what ``--isolate-engine`` adds is events that are
pickled, sent and read once per step.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import psutil
import typer
from outrider import Client

from scripts.bench.tools.common import code_prompts
from scripts.soak.server import running_server

MOST_ADDED = 0.05
"""Share of the processor time that the border may add at batch 8."""
CASES = {"one process": (), "isolated": ("--isolate-engine",)}


def processor_s(pid: int) -> float:
    """Return the processor time of a process and its children, seconds."""
    server = psutil.Process(pid)
    times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def tokens_of(address: str, batch: int, max_tokens: int) -> int:
    """Run a batch of requests to the end, and return the tokens that came."""

    async def one(client: Client, prompt: str) -> int:
        stream = client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return sum([len(response.tokens) async for response in stream])

    async with Client(address) as client:
        await client.wait_ready(timeout_s=60)
        prompts = code_prompts(batch, num_lines=3)
        return sum(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


def measured_ms(bundle: Path, options: tuple[str, ...], batch: int, max_tokens: int) -> float:
    """Return a server's processor time per output token, milliseconds; the first batch warms it up."""
    with running_server(bundle, *options) as server:
        asyncio.run(tokens_of(server.address, batch, max_tokens=8))
        began_s = processor_s(server.pid)
        num_tokens = asyncio.run(tokens_of(server.address, batch, max_tokens))
        return (processor_s(server.pid) - began_s) / num_tokens * 1000.0


def main(
    bundle: Path, batch: int = 8, max_tokens: int = 256, rounds: int = 5, gamma: str = "0"
) -> None:
    """Measure both servers of BUNDLE in turns; exit 1 where isolation adds too much."""
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, options in CASES.items():
            command = (*options, "--gamma", gamma)
            found[name].append(measured_ms(bundle, command, batch, max_tokens))
    for name, values in found.items():
        spread = " ".join(f"{value:.2f}" for value in values)
        typer.echo(f"{name}: {statistics.median(values):.2f} ms of processor per token ({spread})")
    plain, isolated = (statistics.median(found[name]) for name in CASES)
    added = isolated / plain - 1.0
    typer.echo(f"isolation adds {added:+.1%} at batch {batch}; the bound is {MOST_ADDED:+.0%}")
    raise typer.Exit(1 if added > MOST_ADDED else 0)


if __name__ == "__main__":
    typer.run(main)
