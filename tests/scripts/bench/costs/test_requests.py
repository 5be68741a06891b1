"""The benchmark of kinds of requests, run on the tiny pair."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

import scripts.bench.costs.requests as bench


def test_each_kind_has_a_line_with_its_interval(tiny_bundle: Path) -> None:
    app = typer.Typer()
    app.command()(bench.main)
    arguments = [str(tiny_bundle), "--prompt-tokens", "40", "--rounds", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if ": " in line and line[-1] == ")"]
    assert [line.split(": ")[0] for line in lines] == list(bench.KINDS)
    assert all(float(line.split(": ")[1].split()[0]) > 0.0 for line in lines)
