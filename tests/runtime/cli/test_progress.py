"""Stages of a start, shown on standard error."""

import re

import numba
import pytest
from outrider.runtime.cli.progress import COMPILING, compile_stage, stage


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
