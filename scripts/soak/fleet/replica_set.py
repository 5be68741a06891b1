"""Replicas of a bundle, each a server process with a port that it keeps: to be killed and restarted one by one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from scripts.soak.server import STOP_LIMIT_S, start_server, wait_for_port


class Replica:
    """One server process after another, all on the port that the first one found free."""

    def __init__(self, bundle: Path, folder: Path, options: Sequence[str]) -> None:
        self._bundle = bundle
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.audit = folder / "audit.jsonl"
        self.port = 0

    async def start(self) -> None:
        """Start a process, and return once it serves.

        Raises:
            SystemExit: it ended instead.
        """
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        options = ("--port", str(self.port), "--audit-log", str(self.audit), *self._options)
        self._process = process = start_server(self._bundle, port_file, *options)
        self.port = await asyncio.to_thread(wait_for_port, process, port_file)

    async def kill(self) -> None:
        """End the process without a word."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """Drain the process, and return its exit code."""
        return await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, STOP_LIMIT_S)


class ReplicaSet:
    """Some replicas, and the target that a client of all of them calls."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas

    @property
    def target(self) -> str:
        """The gRPC target of all replicas."""
        return "ipv4:" + ",".join(f"127.0.0.1:{one.port}" for one in self.replicas)


@asynccontextmanager
async def running_replicas(bundle: Path, count: int, *options: str) -> AsyncIterator[ReplicaSet]:
    """Serve a bundle by so many processes while the block runs, then drain them.

    Raises:
        RuntimeError: after the block, when one did not end with exit code 0.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(number) for number in range(count)]
        replicas = [Replica(bundle, folder, options) for folder in folders]
        for folder in folders:
            folder.mkdir()
        try:
            await asyncio.gather(*(one.start() for one in replicas))
            yield ReplicaSet(replicas)
        finally:
            codes = await asyncio.gather(*(one.stop() for one in replicas))
    if any(codes):
        raise RuntimeError(f"replicas ended with exit codes {codes}")
