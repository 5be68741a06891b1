"""A real server of a tiny bundle with everything watched, after some traffic."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from outrider import CallError, Client

from tests.runtime.serving.security.credentials import Authority, write

PROMPT = "the quick brown fox jumps over the lazy dog and runs away from the small grey cat " * 2
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Watched:
    """Where a server's metrics are, and what it wrote; ``ask`` sends it some traffic of every kind."""

    address: str
    metrics_port: int
    ca: Path
    log: Path

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            return answer.read().decode()

    def ask(self) -> None:
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        async with Client(self.address, tls_ca=self.ca) as client:
            for options in ({"max_tokens": 30}, {"max_tokens": 30}, {"max_tokens": 4, "n": 2}):
                async for _ in client.generate(PROMPT, temperature=0.0, **options):
                    pass
            with pytest.raises(CallError):
                async for _ in client.generate(PROMPT, max_tokens=1 << 20):
                    pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def watched(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    authority = Authority()
    chain, key = authority.certificate("localhost")
    port_file, metrics_port, log = folder / "port", free_port(), folder / "log"
    command = [
        *(sys.executable, "-m", "outrider.runtime.cli", "serve", tiny_bundle, "--port", "0"),
        *("--port-file", port_file, "--lb-delay-s", "0", "--gamma", "2"),
        *("--tls-certificate", write(folder / "chain.pem", chain)),
        *("--tls-key", write(folder / "key.pem", key)),
        *("--metrics-port", str(metrics_port), "--vllm-metric-names", "--log-format", "json"),
    ]
    with log.open("wb") as written:
        process = subprocess.Popen([*map(str, command)], stderr=written, stdout=subprocess.DEVNULL)
        try:
            limit_s = time.monotonic() + START_LIMIT_S
            while not port_file.exists():
                assert process.poll() is None and time.monotonic() < limit_s, log.read_text()
                time.sleep(0.05)
            address = f"localhost:{port_file.read_text().strip()}"
            server = Watched(address, metrics_port, write(folder / "ca.pem", authority.pem), log)
            server.ask()
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
