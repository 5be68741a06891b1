"""The form of results refuses what is not of it, and the report shows all that a folder holds."""

import json
import sys
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

from scripts.bench.all import BENCHMARKS, chosen, planned, run_job
from scripts.bench.tools.report import JOBS, JobOutcome, write_report
from scripts.bench.tools.results import (
    Recorder,
    Result,
    Row,
    read_result,
    write_result,
)
from scripts.bench.tools.tables import markdown

ROWS = [
    Row(case={"batch": 1, "gamma": 2}, figures={"tokens_per_s": 1234.5, "alpha_hat": None}),
    Row(case={"batch": 8, "gamma": 2}, figures={"tokens_per_s": 0.123456, "best": "a|b"}),
]


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(sys, "argv", ["bench_toy.py", "a b", "--rounds", "1"])
    return Recorder("toy", "what a toy does", 2).result(ROWS, {"rounds": 1})


def test_a_result_is_read_as_it_was_written(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    write_result(path, result)
    assert read_result(path) == result
    assert result.command == "python -m scripts.bench.toy 'a b' --rounds 1"
    assert result.environment.threads == 2
    assert result.environment.memory_bytes > 2**20
    assert {"numpy", "onnxruntime", "torch"} <= set(result.environment.versions)
    assert 0 <= result.foreign_cpu_share <= 1


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("schema_version", 0, "schema_version: must be 1"),
        ("mood", "good", "mood"),
        ("environment.mood", "good", "mood"),
        ("rows", [{"case": {}}], "figures"),
    ],
)
def test_what_is_no_result_is_refused_by_field(
    result: Result, tmp_path: Path, place: str, value: Any, said: str
) -> None:
    values = deepcopy(asdict(result))
    *folders, name = place.split(".")
    inner = values[folders[0]] if folders else values
    inner[name] = value
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"toy.json: .*{said}"):
        read_result(path)


def test_a_figure_that_is_no_number_is_not_written(result: Result, tmp_path: Path) -> None:
    rows = [Row(case={}, figures={"tokens_per_s": float("nan")})]
    with pytest.raises(ValueError, match="JSON"):
        Recorder("toy", "", 1).write(tmp_path / "toy.json", rows, {})
    assert not (tmp_path / "toy.json").exists()


def test_a_table_has_a_column_for_whatever_any_row_has() -> None:
    assert markdown(ROWS).splitlines() == [
        "| batch | gamma | tokens_per_s | alpha_hat | best |",
        "|---|---|---:|---:|---:|",
        "| 1 | 2 | 1234 |  |  |",
        "| 8 | 2 | 0.1235 |  | a\\|b |",
    ]


def test_the_report_shows_results_environment_and_failures(result: Result, tmp_path: Path) -> None:
    write_result(tmp_path / "toy-demo.json", result)
    failed = JobOutcome(name="other", command="python x", code=2, seconds=1.0, said="no such file")
    (tmp_path / JOBS).write_text(json.dumps([asdict(failed)]))
    text = write_report(tmp_path).read_text()
    for part in (
        "## toy-demo",
        result.command,
        result.environment.cpu,
        "numpy ",
        result.environment.date,
        "**other** ended with code 2, without a result",
        "no such file",
        markdown(ROWS),
    ):
        assert part in text


def test_a_report_of_nothing_and_of_a_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no results"):
        write_report(tmp_path)
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(ValueError, match=r"foreign.json: schema_version"):
        write_report(tmp_path)


def test_all_benchmarks_are_planned_with_their_places(tmp_path: Path) -> None:
    bundles = [tmp_path / "one", tmp_path / "two b"]
    runs = planned(BENCHMARKS, bundles, tmp_path / "work", 3, is_quick=True)
    by_name = {name: (module, arguments) for name, module, arguments in runs}
    assert by_name["speculation-two b"][0] == "scripts.bench.speculation"
    assert by_name["speculation-two b"][1][:3] == [str(bundles[1]), "--threads", "3"]
    assert by_name["builds-one"][1][:2] == ["--unseen", str(bundles[0])]
    assert by_name["peers"][1][0] == str(tmp_path / "work" / "peers")
    assert "--rounds" in by_name["speculation-one"][1]
    slow = planned(chosen("speculation"), bundles, tmp_path / "work", 3, is_quick=False)
    assert [name for name, _, _ in slow] == ["speculation-one", "speculation-two b"]
    assert "--rounds" not in slow[0][2]
    for _, module, _ in runs:
        assert (Path(__file__).parents[3] / f"{module.replace('.', '/')}.py").exists()
    with pytest.raises(typer.BadParameter, match="toy: not among"):
        chosen("toy,grpc")


def test_a_benchmark_that_fails_says_why_and_leaves_no_old_result(tmp_path: Path) -> None:
    (tmp_path / "gone.json").write_text("{}")
    outcome = run_job("gone", "scripts.bench_gone", [], tmp_path)
    assert outcome.code != 0
    assert "No module named scripts.bench_gone" in outcome.said
    assert not (tmp_path / "gone.json").exists()
