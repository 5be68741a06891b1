"""What HTTP costs beside gRPC: processor time of one server per output token, for the same streamed requests.

One server has both ports, and rounds take turns, so that what else the machine does meets both. The whole process
counts, engines included, and its event loop alone, where all that differs runs. Clients are another process.

    python -m scripts.bench.costs.http BUNDLE
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import typer

from scripts.bench.costs.isolation import processor_s, tokens_of
from scripts.bench.tools.common import code_prompts
from scripts.bench.tools.paired import interval
from scripts.soak.server import ServerProcess, running_server

MOST_ADDED = 0.05
"""Share of the processor time that HTTP may add at batch 8."""
WHOLE, LOOP = "whole process", "event loop"


def loop_s(pid: int) -> float:
    """Return the processor time of a process's first thread, which runs the event loop, in seconds.

    The scheduler counts nanoseconds; what psutil reads comes in hundredths of a second, and a round has a few of them.
    """
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def tokens_over_http(port: int, batch: int, max_tokens: int) -> int:
    """Run a batch of streams to their end, and return the tokens that came."""
    prompts = code_prompts(batch, num_lines=3)
    return sum(await asyncio.gather(*(_stream(port, one, max_tokens) for one in prompts)))


async def _stream(port: int, prompt: str, max_tokens: int) -> int:
    asked = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    last = ""
    while (line := (await reader.readline()).decode().strip()) != "data: [DONE]":
        if line.startswith("data: "):
            last = line
    writer.close()
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


def spent_ms(pid: int, run: Coroutine[Any, Any, int]) -> dict[str, float]:
    """Return a server's processor time per token of a batch, milliseconds."""
    before = {WHOLE: processor_s(pid), LOOP: loop_s(pid)}
    num_tokens = asyncio.run(run)
    after = {WHOLE: processor_s(pid), LOOP: loop_s(pid)}
    return {name: (after[name] - before[name]) / num_tokens * 1e3 for name in before}


def main(
    bundle: Path, batch: int = 8, max_tokens: int = 256, rounds: int = 8, gamma: str = "4"
) -> None:
    """Measure both ports of a server of BUNDLE in turns; exit 1 where HTTP adds too much."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "http"
        options = ("--gamma", gamma, "--http-port", "0", "--http-port-file", str(file))
        # A busy machine is slow to feed the prompts of a whole batch.
        options += ("--queue-timeout-s", "600")
        with running_server(bundle, *options) as server:
            found = _rounds(server, int(file.read_text()), batch, max_tokens, rounds)
    ratios = {
        name: interval([one[name] for one in found["http"]], [one[name] for one in found["grpc"]])
        for name in (WHOLE, LOOP)
    }
    for name, ratio in ratios.items():
        for way, values in found.items():
            spread = " ".join(f"{one[name]:.3f}" for one in values)
            typer.echo(f"{name}, {way}: ms of processor per token {spread}")
        typer.echo(
            f"{name}: HTTP takes {ratio.ratio:.3f} times what gRPC takes at batch {batch}, "
            f"95 % interval {ratio.low:.3f} to {ratio.high:.3f}"
        )
    added = ratios[WHOLE].ratio - 1.0
    typer.echo(f"HTTP adds {added:+.1%} at batch {batch}; the bound is {MOST_ADDED:+.0%}")
    raise typer.Exit(1 if added > MOST_ADDED else 0)


def _rounds(
    server: ServerProcess, port: int, batch: int, max_tokens: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return what each way took in each round, behind one that warms both up; each begins every other one."""
    ways: dict[str, Callable[[int], Coroutine[Any, Any, int]]] = {
        "grpc": lambda count: tokens_of(server.address, batch, count),
        "http": lambda count: tokens_over_http(port, batch, count),
    }
    for run in ways.values():
        spent_ms(server.pid, run(8))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            found[name].append(spent_ms(server.pid, ways[name](max_tokens)))
    return found


if __name__ == "__main__":
    typer.run(main)
