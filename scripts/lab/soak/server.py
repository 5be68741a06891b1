"""A real server in a process of its own, for the scripts that ask or measure one from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.tools.results import ROOT

STOP_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is up: its process id and the address it listens on."""

    pid: int
    address: str


def outrider(*arguments: str) -> list[str]:
    """Return the command line of an ``outrider`` subcommand in this environment."""
    return [sys.executable, "-m", "outrider.runtime.cli", *arguments]


def wait_for_port(server: subprocess.Popen[bytes], port_file: Path) -> int:
    """Return the port that the server writes once it is ready, however long its start takes.

    Raises:
        SystemExit: the server ended instead.
    """
    while server.poll() is None:
        if port_file.exists() and (text := port_file.read_text().strip()):
            return int(text)
        time.sleep(0.05)
    raise SystemExit(f"the server ended with code {server.returncode}")


def start_server(
    bundle: Path,
    port_file: Path,
    *options: str,
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that serves a bundle and writes its port; of options given twice, the later counts.

    Args:
        bundle: folder to serve.
        port_file: to be written.
        options: further options of ``outrider serve``.
        log: gets standard error; None leaves it where it is.
    """
    command = outrider(
        "serve", str(bundle.resolve()), "--port", "0", "--port-file", str(port_file), "--lb-delay-s", "0",
        *options,
    )  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stderr=log)


@contextmanager
def running_server(
    bundle: Path, *options: str, log: IO[bytes] | None = None
) -> Iterator[ServerProcess]:
    """Serve a bundle on a free port while the block runs, then drain it with SIGTERM.

    Args:
        bundle: folder to serve.
        options: further options of ``outrider serve``.
        log: likewise.

    Raises:
        RuntimeError: after the block, when the server did not end with exit code 0.
    """
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        process = start_server(bundle, port_file, *options, log=log)
        try:
            yield ServerProcess(process.pid, f"localhost:{wait_for_port(process, port_file)}")
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=STOP_LIMIT_S)
    if code:
        raise RuntimeError(f"the server ended with exit code {code}")
