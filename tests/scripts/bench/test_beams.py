"""The beam benchmark: figures by hand, and a run on the tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from outrider.runtime.core.params import BeamParams
from typer.testing import CliRunner

import scripts.bench.beams as bench


def test_figures_are_of_all_rounds_and_of_pairs() -> None:
    plain = bench.Tally(seconds=[2.0, 4.0, 3.0], num_steps=30, num_passes=30)
    tally = bench.Tally(seconds=[1.0, 4.0, 6.0], num_steps=30, num_passes=20)
    row = bench.row_of(BeamParams(num_beams=2, width=4), 3, tally, plain)
    assert row.case == {"num_beams": 2, "beam_width": 4, "gamma": 3}
    assert row.figures == {
        "steps_per_pass": 1.5,
        "steps_per_s": 2.5,
        "median_ratio_of_speeds": 1.0,
    }


def test_a_run_writes_a_row_per_case(tiny_bundle: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench.main)
    out = tmp_path / "beams.json"
    arguments = [str(tiny_bundle), "--num-beams", "2", "--widths", "1,2", "--gammas", "2"]
    more = ["--num-prompts", "1", "--max-tokens", "4", "--rounds", "1", "--json-out", str(out)]
    result = CliRunner().invoke(app, [*arguments, *more])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    cases = [tuple(row["case"].values()) for row in rows]
    assert cases == [(2, 2, 0), (2, 2, 2), (2, 4, 0), (2, 4, 2)]
    assert all(row["figures"]["steps_per_pass"] >= 1.0 for row in rows)
