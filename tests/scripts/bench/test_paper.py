"""The paper's tables out of analyses, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from outrider.runtime.offline.results import AlphaRow, Analysis, SpeedRow
from typer.testing import CliRunner

import scripts.bench.paper as bench
from scripts.bench.paper import OWN, SHARED, entries_of, lenience_rows, speed_rows


def speed(drafter: str, gamma: int, predicted: float, speedup: float) -> SpeedRow:
    return SpeedRow(
        drafter=drafter, temperature=1.0, gamma=gamma, alpha=0.5, draft_cost=0.1, verify_cost=1.2, predicted=predicted,
        best_gamma=gamma, alpha_hat=0.6, tokens_per_step=1.5, operations=2.0, tokens_per_s=100.0, speedup=speedup,
    )  # fmt: skip


def analysis(*drafters: str) -> Analysis:
    alphas = tuple(
        AlphaRow(drafter=name, temperature=1.0, alpha=0.5, coverage=0.9, num_positions=9, lenient={1.0: 0.5, 0.1: 0.8})
        for name in drafters
    )  # fmt: skip
    speeds = [
        speed(name, gamma, predicted, measured)
        for name in drafters
        for gamma, predicted, measured in ((1, 1.1, 1.4), (3, 1.3, 1.2))
    ]
    return Analysis(
        bundle="b", folder="b", device="cpu", weights="float32", num_prompts=1, max_tokens=8, batch=1, rounds=1,
        seconds="wall", alphas=alphas, costs=(), speeds=tuple(speeds), plain_tokens_per_s={1.0: 100.0}, traces=(),
    )  # fmt: skip


def test_the_shared_encoders_draft_stands_behind_the_one_with_its_own() -> None:
    names = [entry.name for entry in entries_of(analysis("model", "bigram"), analysis("model"))]
    assert names == [OWN, SHARED, "bigram"]
    assert [entry.name for entry in entries_of(analysis("model"), None)] == [OWN]


def test_a_row_is_at_the_gamma_that_the_formula_finds_best() -> None:
    (entry,) = entries_of(analysis("model"), None)
    (row,) = speed_rows("translate", entry)
    assert row.case == {"task": "translate", "drafter": OWN, "temperature": 1.0}
    figures = row.figures
    assert (figures["gamma"], figures["exp"], figures["measured"]) == (3, 1.3, 1.2)
    assert figures["best_measured"] == 1.4
    # Theorem 3.8: (1 - 0.5^4) / ((1 - 0.5) (3 * 0.1 + 1)).
    assert figures["exp_paper"] == pytest.approx(1.875 / 1.3)


def test_lenience_has_a_column_each() -> None:
    (entry,) = entries_of(analysis("lookup"), None)
    (row,) = lenience_rows("summarize", entry)
    assert row.case["drafter"] == "lookup"
    assert row.figures == {"alpha_at_1": 0.5, "alpha_at_0.1": 0.8}


def test_a_run_writes_every_table(tiny_text2text_bundle: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench.main)
    out = tmp_path / "paper.json"
    bundle = str(tiny_text2text_bundle)
    sizes = ["--num-sources", "2", "--max-tokens", "5", "--rounds", "1", "--gammas", "2"]
    more = ["--tasks", "translate", "--beams", "1,2", "--json-out", str(out)]
    result = CliRunner().invoke(app, [bundle, *sizes, *more])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    known = [(row["case"].get("drafter"), row["case"].get("temperature")) for row in rows]
    names = (OWN, "unigram", "bigram", "lookup")
    tables = [(name, temperature) for name in names for temperature in (0.0, 1.0)]
    assert known == [*tables, *tables, (None, None), (None, None)]
    alphas, lenient = rows[1]["figures"], rows[len(tables) + 1]["figures"]
    assert 0 < alphas["alpha"] == lenient["alpha_at_1"] < lenient["alpha_at_0.1"]
    assert all(row["figures"]["steps_per_pass"] >= 1.0 for row in rows[2 * len(tables) :])
