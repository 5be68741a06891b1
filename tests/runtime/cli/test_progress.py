"""Stages of a start, shown on standard error."""

import re

import numba
import pytest
from outrider.runtime.cli.progress import (
    COMPILING,
    BuildProgress,
    ExportProgress,
    compile_stage,
    stage,
)


def test_a_stage_says_that_it_begins_and_how_long_it_took(capsys: pytest.CaptureFixture[str]):
    with stage("waiting"):
        assert capsys.readouterr().err == "outrider: waiting ...\n"
    assert re.fullmatch(r"outrider: waiting: \d+\.\d s\n", capsys.readouterr().err)


def test_compiling_is_a_stage_of_its_own_where_it_happens(capsys: pytest.CaptureFixture[str]):
    with compile_stage():
        pass
    assert capsys.readouterr().err == ""
    with compile_stage():
        numba.njit("int64(int64)")(lambda number: number)
        numba.njit("int32(int32)")(lambda number: number)
    assert capsys.readouterr().err.count(f"outrider: {COMPILING}: ") == 1


def test_without_a_terminal_long_work_is_told_in_lines(capsys: pytest.CaptureFixture[str]):
    times = iter([0.0, 3.0, 9.0, 12.0, 13.0, 20.0])
    with BuildProgress(clock=lambda: next(times)) as progress:
        for step in range(1, 6):
            progress.report("speed", step, 5)
        progress.report("traces", 1, 1)
    assert capsys.readouterr().err.splitlines() == [
        "outrider: speed: 1 of 5 ...",
        "outrider: speed: 4 of 5 ... about 3 s left",
        "outrider: speed: 5 of 5",
        "outrider: traces: 1 of 1",
    ]


def test_an_export_is_told_by_stages_and_the_steps_of_long_ones(capsys: pytest.CaptureFixture[str]):
    times = iter([100.0, 100.0, 102.5, 103.0, 104.0, 113.5, 114.0])
    with ExportProgress(clock=lambda: next(times)) as progress:
        progress.stage("target: loading llama")
        progress.stage("target: storing the weights as int8")
        for step in range(1, 4):
            progress.report("target: weights", step, 4)
        progress.stage("manifest: hashing files")
    assert capsys.readouterr().err.splitlines() == [
        "export:    0.0 s  target: loading llama",
        "export:    2.5 s  target: storing the weights as int8",
        "outrider: target: weights: 1 of 4 ...",
        "outrider: target: weights: 3 of 4 ... about 4 s left",
        "export:   14.0 s  manifest: hashing files",
    ]


def test_a_terminal_shows_the_stage_that_is_under_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    with ExportProgress() as progress:
        progress.stage("first")
        progress.report("weights", 1, 2)
        progress.report("weights", 2, 2)
        progress.stage("second")
        assert [task.description for task in progress._progress.tasks] == ["second"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (89.0, "89 s"), (91.0, "2 min"), (5399.0, "90 min"), (5400.0, "1.5 h")],
)
def test_what_will_take_long_says_so_before_it_begins(
    seconds: float, words: str, capsys: pytest.CaptureFixture[str]
):
    with BuildProgress() as progress:
        progress.expect("14 runs", seconds)
    assert capsys.readouterr().err == f"outrider: 14 runs: about {words}; --quick takes less\n"
