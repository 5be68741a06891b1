"""A server on a machine that gives it little: few files, little memory, full disks, no shared memory, no home."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outrider import Client

ROOT = Path(__file__).parents[4]
PATIENCE_S = 120.0
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# Who may ask what time it is: what the world outside is told, or tells; everything else takes monotonic seconds.
WALL_CLOCK = {
    "addons/vllm/service.py", "calibration/store.py", "serving/chat/encoder.py", "serving/chat/template.py",
    "serving/http/factory.py", "serving/http/openai/completions.py", "serving/observability/logs.py",
    "serving/observability/spans.py", "serving/process.py", "serving/security/audit.py",
    "serving/security/certificate.py", "serving/security/tokens.py",
}  # fmt: skip


async def answer(address: str) -> int:
    async with Client(address) as client:
        await client.wait_ready(timeout_s=PATIENCE_S)
        found = [one async for one in client.generate("the quick", max_tokens=5, ignore_eos=True)]
        return int(found[-1].finish.usage.output_tokens)


async def crowd(address: str, num: int) -> list[asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    writers = []
    for _ in range(num):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(GREETING)
        writers.append(writer)
    return writers


def serving(bundle: Path, port_file: Path) -> list[str]:
    command = [sys.executable, "-m", "outrider.runtime.cli", "serve", str(bundle), "--port", "0"]
    return [*command, "--port-file", str(port_file), "--lb-delay-s", "0"]


def without_shared_memory() -> tuple[str, ...]:
    """Return what runs a command on a machine where nobody may write into /dev/shm."""
    script = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", script, "")
    if subprocess.run((*within, "true"), capture_output=True).returncode:
        pytest.skip("this process may not mount")
    return within


@pytest.mark.parametrize(
    "kind",
    ["few files", "little memory", "full disks", "no home", "no shared memory"],
    ids=lambda kind: kind.replace(" ", "_"),
)
async def test_a_server_answers_where_a_machine_gives_it_little(
    kind: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Every accepted request is answered, and SIGTERM ends the server with its exit code."""
    port_file, options, environment = tmp_path / "port", ["--costs", str(tmp_path / "costs")], {}
    most_files = 64 if kind == "few files" else None
    within = without_shared_memory() if kind == "no shared memory" else ()
    if kind == "full disks":
        options = ["--audit-log", "/dev/full", "--costs", "/proc/nowhere"]
    if kind == "no home":
        options, environment = [], {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}

    def limited() -> None:
        if most_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        if kind == "little memory":
            resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))

    with Path("/dev/full" if kind == "full disks" else os.devnull).open("wb") as log:  # noqa: ASYNC230
        server = await asyncio.create_subprocess_exec(
            *(*within, *serving(tiny_bundle, port_file), *options),
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"] if within else "",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                **environment,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            preexec_fn=limited,
        )
    try:
        assert server.stdout is not None
        line = await asyncio.wait_for(server.stdout.readline(), PATIENCE_S)
        assert line.startswith(b"serving on port"), line
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        assert await answer(address) == 5
        if most_files is not None:
            writers = await crowd(address, 2 * most_files)
            for writer in writers:
                writer.transport.abort()
        assert await answer(address) == 5
        server.send_signal(signal.SIGTERM)
        # Python's own code for standard error that cannot be written is 120.
        code = 120 if kind == "full disks" else 0
        assert await asyncio.wait_for(server.wait(), PATIENCE_S) == code
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


@pytest.mark.long
async def test_starts_that_race_for_empty_caches_both_answer(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    """Both compile the sampler's loops into one folder, and measure into another."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    files = [tmp_path / "0", tmp_path / "1"]
    servers = [
        await asyncio.create_subprocess_exec(
            *(*serving(tiny_bundle, file), "--costs", str(tmp_path / "costs")),
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for file in files
    ]
    try:
        for server, file in zip(servers, files, strict=True):
            assert server.stdout is not None
            line = await asyncio.wait_for(server.stdout.readline(), 3 * PATIENCE_S)
            assert line.startswith(b"serving on port"), line
            assert await answer(f"127.0.0.1:{file.read_text().strip()}") == 5
            server.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(server.wait(), PATIENCE_S) == 0
    finally:
        for server in servers:
            if server.returncode is None:
                server.kill()
                await server.wait()
    assert [one.suffix for one in (tmp_path / "costs").iterdir()] == [".json"]
    assert [*(tmp_path / "loops").rglob("*.nbi")]


def test_no_jump_of_the_clock_reaches_a_request() -> None:
    """Deadlines, quotas, queues and watchdogs take monotonic seconds: the wall clock is read in few places."""
    found = {
        str(path.relative_to(ROOT / "runtime"))
        for path in (ROOT / "runtime").rglob("*.py")
        if re.search(r"\btime\.time\(|datetime\.now\b|time_ns\(|utcnow", path.read_text("utf-8"))
    }
    assert found <= WALL_CLOCK, found - WALL_CLOCK
