"""The commands of docs/security.md, one after the other, as somebody types them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "security.md"
# Seconds that a server may take to end; any machine needs far less.
PATIENCE_S = 120


def commands() -> list[str]:
    """The lines of the page's blocks, continued lines joined."""
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    return [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M)
        for line in block.splitlines()
    ]


class Typist:
    """Runs commands in a folder of its own, and servers beside them, one at a time."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.folder, self.bundle = folder, bundle
        self.server: subprocess.Popen[str] | None = None
        shim = folder / "bin" / "outrider"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m outrider.runtime.cli "$@"\n')
        shim.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def run(self, line: str) -> str:
        """Run a command, and return what it prints."""
        line = line.replace("BUNDLE", str(self.bundle)).replace("50051", str(self.port))
        if line.startswith("outrider serve"):
            self.serve(line)
            return ""
        if line.startswith("outrider generate"):
            line += " --max-tokens 4"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def serve(self, line: str) -> None:
        self.stop()
        more = ["--lb-delay-s", "0", "--gamma", "0"]
        more += [] if "--port " in line else ["--port", "0"]
        self.server = subprocess.Popen(
            [*line.split(), *more],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None
        said = self.server.stdout.readline()  # empty where the server has ended
        assert said.startswith("serving on"), line

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            _, _ = self.server.communicate(timeout=PATIENCE_S)
            assert self.server.returncode == 0
            self.server = None


def test_the_page_s_commands_work_in_their_order(tmp_path: Path, tiny_bundle: Path):
    if shutil.which("openssl") is None or shutil.which("bash") is None:
        pytest.skip("needs openssl and bash")
    typist = Typist(tmp_path, Path(shutil.copytree(tiny_bundle, tmp_path / "bundle")))
    try:
        printed = {line: typist.run(line) for line in commands()}
    finally:
        typist.stop()
    assert [line for line in printed if "outrider serve" in line]
    (answer,) = [text for line, text in printed.items() if "outrider generate" in line]
    assert answer.strip()
    (key,) = (tmp_path / "acme.key").read_text().split()
    (line,) = (tmp_path / "keys").read_text().splitlines()
    assert key not in line and line.endswith(":acme:generate,info")


def test_what_was_tried_names_files_that_are_there():
    text = PAGE.read_text("utf-8").partition("## What was tried")[2]
    named = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(named) > 25
    assert not [one for one in named if not (ROOT / one).is_file()]
