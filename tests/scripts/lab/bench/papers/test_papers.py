"""The tables of the papers on the tiny pair: a row that is on record is not run again, and two runs agree in tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.lab.bench.papers.__main__ import main
from scripts.lab.bench.papers.common import Cell, Context, run_table


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("the quick\nbrown fox\n")
    return path


def context_of(bundle: Path, prompts: Path, out: Path) -> Context:
    return Context.of(bundle, prompts, num_prompts=2, max_tokens=4, threads=0, out=out)


def test_a_row_on_record_is_not_run_again(tmp_path: Path, prompts: Path) -> None:
    runs: list[int] = []

    def measure(gamma: int) -> dict[str, int]:
        runs.append(gamma)
        return {"figure": 10 * gamma}

    def table(_: Context) -> list[Cell]:
        return [Cell(case={"gamma": one}, measure=lambda one=one: measure(one)) for one in (1, 2)]

    context = context_of(Path("bundle"), prompts, tmp_path / "out")
    first = run_table(context, "table", table)
    record = tmp_path / "out" / "table.jsonl"
    assert [json.loads(line)["figures"] for line in record.read_text().splitlines()] == [
        {"figure": 10},
        {"figure": 20},
    ]
    # Killed while it wrote the second line.
    record.write_text(record.read_text()[:-5])
    assert run_table(context, "table", table) == first
    assert run_table(context, "table", table) == first
    assert runs == [1, 2, 2]
    # Other settings are other rows.
    context.max_tokens = 8
    run_table(context, "table", table)
    assert runs == [1, 2, 2, 1, 2]


def test_two_cells_of_one_case_are_refused(tmp_path: Path, prompts: Path) -> None:
    context = context_of(Path("bundle"), prompts, tmp_path / "out")
    with pytest.raises(ValueError, match="two cells"):
        run_table(context, "table", lambda _: [Cell(case={}, measure=dict)] * 2)


def test_greedy_tokens_are_one_at_every_gamma(
    tiny_bundle: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(tiny_bundle, prompts, out, only="leviathan-4", num_prompts=2, max_tokens=8, threads=0)
    rows = [json.loads(line) for line in (out / "leviathan-4.jsonl").read_text().splitlines()]
    greedy = [row["figures"] for row in rows if row["case"]["temperature"] == 0.0]
    assert len({row["tokens"] for row in greedy}) == 1
    sampled = [row["figures"] for row in rows if row["case"]["temperature"] == 1.0]
    assert sampled[0]["tokens_per_pass"] == 1.0 < sampled[1]["tokens_per_pass"]
    assert "| temperature | gamma |" in capsys.readouterr().out
