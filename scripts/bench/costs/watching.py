"""What watching costs: processor time per step with logs, metrics and traces, against a server that counts nothing.

    python -m scripts.bench.costs.watching BUNDLE

Both servers of a bundle stay up and answer the same greedy requests in turns, another one first in each round. All
threads of a server count, engines included, but neither the client nor the collector. The watched one writes a line of
JSON per request, is scraped every second under both kinds of names, and sends every span.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import typer

from scripts.bench.costs.isolation import processor_s, tokens_of
from scripts.bench.tools.paired import interval
from scripts.soak.server import ServerProcess, running_server

MOST_ADDED = 0.02
"""Share of the processor time per step that watching may add at batch 8."""
SCRAPE_EVERY_S = 1.0
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
UNWATCHED = "scripts.bench.costs.unwatched"
QUIET = ("--no-access-log", "--log-level", "error")


class Collector:
    """Takes spans over gRPC, and scrapes metrics, until it is closed.

    Attributes:
        url: for spans.
        num_exports: calls that brought spans.
        num_scrapes: answers with metrics.
    """

    def __init__(self, metrics_port: int) -> None:
        self.num_exports = self.num_scrapes = 0
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(self._take)
        handler = grpc.method_handlers_generic_handler(COLLECTOR, {"Export": method})
        self._server.add_generic_rpc_handlers((handler,))
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._is_over = threading.Event()
        self._scraper = threading.Thread(target=self._scrape)
        self._scraper.start()

    def close(self) -> None:
        """Take nothing any more."""
        self._is_over.set()
        self._scraper.join()
        self._server.stop(0).wait()

    def _take(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_exports += 1
        return b""  # an answer without fields

    def _scrape(self) -> None:
        while not self._is_over.wait(SCRAPE_EVERY_S):
            with contextlib.suppress(OSError), urllib.request.urlopen(self._metrics_url) as answer:
                self.num_scrapes += bool(answer.read())


@contextlib.contextmanager
def both_servers(
    bundle: Path, options: tuple[str, ...]
) -> Iterator[tuple[dict[str, ServerProcess], Collector]]:
    """Run the watched server, another one that counts nothing, and who collects."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    with (
        contextlib.closing(Collector(metrics_port)) as collector,
        tempfile.TemporaryFile() as log,
        running_server(bundle, *options, *QUIET, module=UNWATCHED, log=log) as unwatched,
        running_server(
            bundle, *options, "--log-format", "json", "--metrics-port", str(metrics_port),
            "--vllm-metric-names", "--otlp-endpoint", collector.url, log=log,
        ) as watched,
    ):  # fmt: skip
        yield {"unwatched": unwatched, "watched": watched}, collector


def ms_per_step(server: ServerProcess, batch: int, max_tokens: int) -> float:
    """Return a server's processor time per step, milliseconds; of a batch each step gives every row a token."""
    began_s = processor_s(server.pid)
    num_tokens = asyncio.run(tokens_of(server.address, batch, max_tokens))
    return (processor_s(server.pid) - began_s) / (num_tokens / batch) * 1000.0


def main(
    bundle: Path,
    batch: int = 8,
    max_tokens: int = 256,
    rounds: int = 12,
    gamma: str = "0",
    costs: Path | None = None,
) -> None:
    """Measure both servers of BUNDLE in turns; exit 1 unless watching surely adds no more than its bound."""
    options = ("--gamma", gamma, *(() if costs is None else ("--costs", str(costs))))
    found: dict[str, list[float]] = {"unwatched": [], "watched": []}
    with both_servers(bundle, options) as (servers, collector):
        for server in servers.values():
            asyncio.run(tokens_of(server.address, batch, max_tokens=16))
        for number in range(rounds):
            for name in sorted(servers, reverse=number % 2 == 1):
                found[name].append(ms_per_step(servers[name], batch, max_tokens))
        num_exports, num_scrapes = collector.num_exports, collector.num_scrapes
    for name, values in found.items():
        spread = " ".join(f"{value:.2f}" for value in values)
        typer.echo(f"{name}: {statistics.median(values):.3f} ms of processor per step ({spread})")
    added = interval(found["watched"], found["unwatched"])
    typer.echo(
        f"watching adds {added.ratio - 1:+.2%} ({added.low - 1:+.2%} to {added.high - 1:+.2%}, 95 %) at batch {batch}; "
        f"the bound is {MOST_ADDED:+.0%}; {num_scrapes} scrapes, {num_exports} exports of spans"
    )
    raise typer.Exit(0 if added.high - 1.0 <= MOST_ADDED and num_scrapes and num_exports else 1)


if __name__ == "__main__":
    typer.run(main)
