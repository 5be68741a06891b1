"""``scripts.gpu.first.run`` on an emulated GPU, in a process of its own: python -m tests.emulation.first."""

from __future__ import annotations

import sys

import typer
from typer.testing import CliRunner

from tests.emulation.gpu_check import play_device


def main(arguments: list[str]) -> int:
    """Run one command; the exit code is its own."""
    play_device(arguments)
    from scripts.gpu.first.run import main as first

    app = typer.Typer()
    app.command()(first)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    print(result.output)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
