"""Options of ``outrider serve`` that say how it is watched: what is refused, and that a bug is a line of the log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_TERMINATED
from outrider.runtime.serving import process as server
from typer.testing import CliRunner

from tests.runtime.cli.test_refusals import refused


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--log-format", "xml", "log_format: must be one of console, json"),
        ("--log-level", "loud", "log_level: must be one of debug, info, warning, error, critical"),
    ],
)
def test_unknown_names_are_refused_in_one_line(
    tmp_path: Path, option: str, value: str, said: str
) -> None:
    assert said in refused("serve", tmp_path, option, value)


def test_a_collector_s_address_that_is_none_is_refused(tiny_bundle: Path) -> None:
    said = refused("serve", tiny_bundle, "--port", "0", "--otlp-endpoint", "localhost:4317")
    assert "otlp_endpoint: must be http://HOST:PORT" in said


def test_sigterm_ends_a_start_from_its_first_moment_on(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from outrider.runtime.cli.main import app\n"
        "from outrider.runtime.cli.serve import command\n"
        "command.build = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "app(['serve', sys.argv[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (EXIT_TERMINATED, "")


def test_sigterm_ends_the_first_process_of_a_container_while_it_imports() -> None:
    program = (
        "import os, signal\n"
        "from outrider.runtime.cli import entry\n"
        "own = os.getpid()\n"
        "os.getpid = lambda: 1\n"
        "entry.util.find_spec = lambda *_: os.kill(own, signal.SIGTERM)\n"
        "entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (EXIT_TERMINATED, "")


def test_a_bug_is_one_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_down(*_: object) -> int:
        raise LookupError("a bug")

    monkeypatch.setattr(server, "serve", break_down)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--log-format", "json"])
    assert result.exit_code == 70
    (line,) = result.stderr.splitlines()
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("critical", "uncaught")
    assert "LookupError: a bug" in told["traceback"]
