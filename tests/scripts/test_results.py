"""The form of results refuses what is not of it."""

import json
import sys
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.results import (
    Recorder,
    Result,
    Row,
    read_result,
    write_result,
)
from scripts.tools.tables import markdown

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
    assert result.command == "python -m scripts.lab.bench.toy 'a b' --rounds 1"
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
