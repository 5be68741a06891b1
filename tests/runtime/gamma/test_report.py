"""A report is of one moment, wherever a reader and the worker interrupt each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from outrider.runtime.core.stats import ControlReport
from outrider.runtime.gamma import report
from outrider.runtime.gamma.report import GammaStats

Write = Callable[[GammaStats], None]


def interrupted_at_every_line(run: Callable[[], Any], interrupt: Callable[[], None]) -> Any:
    """Return what ``run`` returns, having called ``interrupt`` before each line of the module under test."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != report.__file__:
            return None
        if event == "line":
            sys.settrace(None)
            interrupt()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)


def used() -> GammaStats:
    one = GammaStats(2)
    fixed = np.array([[1.0, 1.8, 2.1], [1.0, 1.2, 1.9]])
    for number in range(9):
        one.step((2.0, 1.1, 1, 1.0), is_on=number % 3 > 0, is_probe=number % 3 == 0)
    one.consider(fixed)
    one.decided(0.5)
    return one


WRITES: dict[str, Write] = {
    "a step": lambda one: one.step((1.0, 7.0, 1, 1.0), is_on=False, is_probe=True),
    "a decision": lambda one: one.consider(np.array([[9.0, 1.0, 1.0], [1.0, 1.0, 1.0]])),
    "the time of a decision": lambda one: one.decided(0.25),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_report_during_a_write_is_of_before_or_after_it(write: Write) -> None:
    one, seen = used(), list[ControlReport]()
    one.step((1.0, 3.0, 1, 1.0), is_on=True, is_probe=False)
    before = one.report()
    interrupted_at_every_line(lambda: write(one), lambda: seen.append(one.report()))
    assert seen
    assert set(seen) <= {before, one.report()}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_report_that_is_interrupted_by_writes_is_of_one_moment(write: Write) -> None:
    one = used()
    moments = [one.report()]

    def interrupt() -> None:
        write(one)
        moments.append(one.report())

    assert interrupted_at_every_line(one.report, interrupt) in moments
    assert len(moments) > 3
