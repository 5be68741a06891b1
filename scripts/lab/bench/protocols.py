"""HTTP beside gRPC: time to the first token, tokens/s and the server's processor time of the same streamed answers.

    python -m scripts.lab.bench.protocols BUNDLE

One server answers both in turns, one stream at a time. A line for each has the medians of the rounds; the last one
has the medians of HTTP over gRPC, round by round.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from outrider import SyncClient

from scripts.lab.soak.server import running_server

PROMPT = "def fibonacci(n):\n"
_TICKS = os.sysconf("SC_CLK_TCK")
Run = tuple[float, float, float]
"""Seconds to the first token, tokens per second behind it, and the server's processor seconds."""


def main(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    max_tokens: int = 64,
    rounds: int = 10,
) -> None:
    """Print medians and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        options = ("--http-port", "0", "--http-port-file", str(port), "--prefix-cache-bytes", "0")
        with running_server(bundle, *options) as server, SyncClient(server.address) as client:
            asked = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}

            def over_grpc() -> Iterator[None]:
                yield from (None for _ in client.generate(PROMPT, **asked))

            def over_http() -> Iterator[None]:
                yield from _lines(
                    int(port.read_text()), {"prompt": PROMPT, "stream": True, **asked}
                )

            ways = {"gRPC": over_grpc, "HTTP": over_http}
            found: dict[str, list[Run]] = {name: [] for name in ways}
            for index in range(rounds + 1):
                for name, ask in ways.items():
                    run = _run(ask, server.pid, max_tokens)
                    if index:  # the first one warms up
                        found[name].append(run)
    for name, runs in found.items():
        first, speed, used = (median(column) for column in zip(*runs, strict=True))
        typer.echo(f"{name}: {first * 1e3:.1f} ms, {speed:.1f} tokens/s, {used:.2f} processor s")
    pairs = zip(found["HTTP"], found["gRPC"], strict=True)
    ratios = zip(*([a / b for a, b in zip(*pair, strict=True)] for pair in pairs), strict=True)
    typer.echo("HTTP / gRPC: " + ", ".join(f"{median(column):.3f}" for column in ratios))


def _run(ask: Callable[[], Iterator[None]], pid: int, max_tokens: int) -> Run:
    used, begin = _processor_s(pid), time.perf_counter()
    answer = ask()
    next(answer)
    first = time.perf_counter()
    for _ in answer:
        pass
    end = time.perf_counter()
    return first - begin, (max_tokens - 1) / (end - first), _processor_s(pid) - used


def _lines(port: int, body: dict[str, object]) -> Iterator[None]:
    """Yield at each event of a streamed completion that has a text."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
            yield None
    connection.close()


def _processor_s(pid: int) -> float:
    """Return the processor seconds of a process and those that it has started."""
    own = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    return (int(own[11]) + int(own[12])) / _TICKS + sum(_processor_s(int(one)) for one in children)


if __name__ == "__main__":
    typer.run(main)
