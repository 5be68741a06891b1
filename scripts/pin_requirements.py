"""Writes requirements.txt anew: the same versions, each with the hashes of all files that its index has of it.

    python -m scripts.pin_requirements [--version NAME==VERSION ...]

``--version`` changes a pin or adds one. Needs ``uv``, which asks the index for hashes and downloads no packages.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

FILE = Path(__file__).parents[1] / "requirements.txt"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.M)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(text: str) -> dict[str, str]:
    """Return the versions of a file of requirements by name."""
    return {name.lower().replace("_", "-"): version for name, version in PIN.findall(text)}


def head(text: str) -> str:
    """Return the comments that a file begins with."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def hashed(versions: Mapping[str, str]) -> str:
    """Return requirements with the index's hashes.

    Raises:
        CalledProcessError: the index lacks a version.
    """
    asked = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    options = ["--no-deps", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command = ["uv", "pip", "compile", "-", *options]
    return subprocess.run(
        command, input=asked, text=True, check=True, stdout=subprocess.PIPE
    ).stdout


def main(version: Annotated[list[str] | None, typer.Option()] = None) -> None:
    text = FILE.read_text(encoding="utf-8")
    versions = pins(text) | pins("\n".join(version or ()))
    FILE.write_text(head(text) + hashed(versions), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
