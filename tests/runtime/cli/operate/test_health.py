"""``outrider health``: exit codes and words for probes, from before a model is open to the end of a drain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from outrider import Unauthenticated
from outrider.runtime.cli.main import app
from outrider.runtime.cli.operate import health as command
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.settings import ServeOptions
from typer.testing import CliRunner

from tests.runtime.conftest import Start
from tests.runtime.served import server_of
from tests.runtime.serving.security.credentials import Authority, key_security, write


async def health(*arguments: str) -> tuple[int, str]:
    """Return exit code and line of the command, run beside the server's event loop."""
    result = await asyncio.to_thread(CliRunner().invoke, app, ["health", *arguments])
    return result.exit_code, result.output.strip()


async def test_a_start_is_told_by_its_stage_and_lives():
    server = Server(
        ServerState(RequestAccounting(Metrics(), lambda: 0.0)), ServerConfig(), RequestLimits()
    )
    address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    server.readiness.note("measuring what steps cost")
    code, line = await health("--address", address)
    assert code == 1
    assert line.startswith("outrider: NOT_READY: ")
    assert "measuring what steps cost" in line
    assert await health("--address", address, "--service", "liveness") == (0, "serving")
    await server.abandon()
    code, line = await health("--address", address)
    assert code == 1
    assert line.startswith("outrider: UNAVAILABLE: ")


async def test_a_wait_tells_each_stage_once_and_ends_when_it_serves(tiny_bundle: Path):
    config = ServerConfig(default_gamma=1, lb_delay_s=0.0, drain_timeout_s=0.0)
    opened = load_model(tiny_bundle, ServeOptions(config=config))
    server = server_of(opened)
    port = await server.listen("127.0.0.1:0")
    server.readiness.note("stage one")
    command = (sys.executable, "-m", "outrider.runtime.cli", "health", "--wait", "60")
    child = await asyncio.create_subprocess_exec(
        *command, "--address", f"127.0.0.1:{port}", stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stderr is not None
        assert "stage one" in (await child.stderr.readline()).decode()
        server.readiness.note("stage two")
        assert "stage two" in (await child.stderr.readline()).decode()
        await server.open(opened)
        out, err = await child.communicate()
        assert (child.returncode, out, err) == (0, b"serving\n", b"")
    finally:
        server.hurry()
        await server.drain()
        opened.close()


async def test_a_drain_is_told(start_endless: Start):
    config = ServerConfig(lb_delay_s=60.0, drain_timeout_s=0.0)
    async with start_endless(config=config) as run:
        draining = asyncio.create_task(run.server.drain())
        # Health is the first that a drain changes; what it does next takes a minute.
        await asyncio.sleep(0)
        run.server.readiness.handler.close_admission()
        assert await health("--address", run.address) == (1, "outrider: draining")
        assert await health("--address", run.address, "--service", "liveness") == (0, "serving")
        run.server.hurry()
        await draining


async def test_credentials_are_those_of_other_commands(start: Start, tmp_path: Path):
    authority = Authority()
    chain, key = authority.certificate("localhost")
    files = {
        name: write(tmp_path / name, data)
        for name, data in {"ca": authority.pem, "chain": chain, "key": key}.items()
    }
    security, keys = key_security(
        tmp_path, tls_certificate=files["chain"], tls_key=files["key"], has_open_health=False
    )
    trusting = grpc.ssl_channel_credentials(authority.pem)
    async with start(security=security, host="localhost", credentials=trusting) as run:
        tls = ("--address", run.address, "--tls-ca", str(files["ca"]))
        secret = write(tmp_path / "secret", keys["x"])
        assert await health(*tls, "--api-key-file", str(secret)) == (0, "serving")
        code, line = await health(*tls)
        assert (code, line.partition(":")[2].split(":")[0]) == (1, " UNAUTHENTICATED")
        code, line = await health(*tls, "--api-key-file", str(tmp_path / "nowhere"))
        assert code == 2


async def test_who_may_ask_for_health_alone_is_told_that_it_is_not_serving(tmp_path: Path):
    security, _ = key_security(tmp_path)
    readiness = ServerState(RequestAccounting(Metrics(), lambda: 0.0))
    server = Server(readiness, ServerConfig(), RequestLimits(), security=security)
    address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    assert await health("--address", address) == (1, "outrider: not serving")
    await server.abandon()


@pytest.mark.parametrize(("at_s", "patience_s"), [(90.0, 5.0), (98.0, 2.0), (101.0, 0.5)])
def test_a_call_takes_no_longer_than_what_is_left_of_a_wait(
    monkeypatch: pytest.MonkeyPatch, at_s: float, patience_s: float
):
    asked: list[float] = []

    class Deaf:
        def is_serving(self, timeout_s: float) -> bool:
            asked.append(timeout_s)
            return False

        def info(self, timeout_s: float) -> None:
            asked.append(timeout_s)
            raise Unauthenticated(grpc.StatusCode.UNAUTHENTICATED, "")

    monkeypatch.setattr(command.time, "monotonic", lambda: at_s)
    assert command._look(Deaf(), command.Service.READY, 100.0) == "not serving"
    assert asked == [patience_s] * 2


def test_it_loads_no_engine_and_no_server():
    program = (
        "import sys\n"
        "from outrider.runtime.cli.main import app\n"
        "app(['health', '--address', 'unix:/nowhere'], standalone_mode=False)\n"
        "print(*sorted(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.startswith("outrider: UNAVAILABLE: "), done.stderr
    loaded = done.stdout.split()
    heavy = ("onnxruntime", "numba", "torch", "transformers", "tokenizers", "prometheus_client")
    ours = ("outrider.runtime.serving.", "outrider.runtime.loop", "outrider.export")
    assert "outrider.runtime.cli.operate.health" in loaded
    # Help of other commands is made of the settings of a server.
    names = ("settings", "security", "security.addresses", "security.options")
    light = {f"outrider.runtime.serving.{name}" for name in names}
    assert not [name for name in {*loaded} - light if name.startswith((*heavy, *ours))]
    # Typer's own checks of values (pydantic) are a third of them.
    assert len(loaded) < 700
