"""``outrider warm``: what it did ahead, a start does not do again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.calibration.calibrate import calibrate
from outrider.runtime.cli.main import app
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.serving import factory
from typer.testing import CliRunner

COMMAND = (sys.executable, "-m", "outrider.runtime.cli")


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[CostTable]:
    """Tables measured, by a clock on which every step takes as long."""
    found: list[CostTable] = []

    def measured(**given: Any) -> CostTable:
        ticks = itertools.count()
        found.append(calibrate(**{**given, "clock": lambda: next(ticks) * 1e-3}))
        return found[-1]

    monkeypatch.setattr(factory, "calibrate", measured)
    return found


def test_a_start_after_it_measures_nothing(
    tiny_bundle: Path, tmp_path: Path, measurements: list[CostTable]
):
    arguments = ["warm", str(tiny_bundle), "--costs", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--refresh-costs"])
    assert result.exit_code == 0, result.output
    assert "a start with these settings measures nothing" in result.stdout
    assert len(measurements) == 1
    assert len(list(tmp_path.iterdir())) == 1
    options = factory.ServeOptions(costs_folder=tmp_path)
    factory.load_model(tiny_bundle, options).close()
    assert len(measurements) == 1
    # With other slots steps have other costs.
    assert CliRunner().invoke(app, [*arguments, "--max-running", "2"]).exit_code == 0
    assert len(measurements) == 2


def test_what_cannot_be_kept_is_said(tiny_bundle: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    arguments = ["warm", str(tiny_bundle), "--costs", str(tmp_path / "file"), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "a start still begins with measuring what steps cost" in result.stderr


@pytest.mark.long
def test_a_start_after_it_compiles_and_writes_nothing(tiny_bundle: Path, tmp_path: Path):
    loops = tmp_path / "loops"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(loops)}
    arguments = (str(tiny_bundle), "--device", "cpu", "--gamma", "2")
    warm = subprocess.run(
        [*COMMAND, "warm", *arguments], env=environment, capture_output=True, text=True
    )
    assert warm.returncode == 0, warm.stderr
    assert "compiling loops for this machine" in warm.stderr
    kept = {path: path.stat().st_mtime_ns for path in loops.rglob("*")}
    server = subprocess.Popen(
        [*COMMAND, "serve", *arguments, "--uds", str(tmp_path / "socket"), "--lb-delay-s", "0"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    health = [*COMMAND, "health", "--address", f"unix:{tmp_path}/socket", "--wait", "60"]
    asked = subprocess.run(health, capture_output=True, text=True)
    server.send_signal(signal.SIGTERM)
    _, said = server.communicate()
    assert asked.returncode == 0, asked.stderr + said
    assert server.returncode == 0, said
    assert "compiling" not in said
    assert {path: path.stat().st_mtime_ns for path in loops.rglob("*")} == kept
