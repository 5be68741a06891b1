"""Environments of their own for other people's clients, which must not share libraries with the server.

Each is made once and kept in pytest's cache, under a name that its requirements give it. Where no index has these, the
test is skipped by name.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

COMPLETE = "complete"
"""File that is written last."""
MOST_INSTALL_S = 1800


class Environments:
    """Makes environments in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def python(self, *requirements: str) -> Path:
        """Return the interpreter of an environment with these packages, pinned, and what they need."""
        folder = self._made(("python", sys.version, *requirements), _make_python)
        return folder / "bin" / "python"

    def node(self, *packages: str) -> Path:
        """Return a folder whose ``node_modules`` has these packages of npm, pinned, for scripts that lie in it."""
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        return self._made(("node", *packages), _make_node)

    def _made(self, key: tuple[str, ...], make: Callable[[Path, Sequence[str]], None]) -> Path:
        kind, *_, last = key
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:12]
        name = "-".join(re.findall("[a-z0-9]+", re.split("(?<!^)[=@<>]", last)[0]))
        folder = self._folder / f"{kind}-{name}-{digest}"
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, key[2:] if kind == "python" else key[1:])
            (folder / COMPLETE).touch()
        return folder


def _make_python(folder: Path, requirements: Sequence[str]) -> None:
    # This environment's pip installs into the other one, which needs none of its own.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    _install([*pip, "install", "--quiet", "--disable-pip-version-check", *requirements])


def _make_node(folder: Path, packages: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    _install(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *packages]
    )


def _install(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_INSTALL_S)
    if done.returncode != 0:
        pytest.skip(f"no index gives {command[-1]}: {(done.stderr or done.stdout)[-300:]}")


@pytest.fixture(scope="session")
def environments(pytestconfig: pytest.Config) -> Environments:
    """Makes environments for clients, kept between runs."""
    cache = pytestconfig.cache
    assert cache is not None
    return Environments(cache.mkdir("environments"))
