"""Stages of a start, shown on standard error."""

import re

import numba
import pytest
from outrider.runtime.cli.progress import COMPILING, BuildProgress, compile_stage, stage


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
        "outrider: speed: 4 of 5 ...",
        "outrider: speed: 5 of 5",
        "outrider: traces: 1 of 1",
    ]
