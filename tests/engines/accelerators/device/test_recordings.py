"""Runs that come again are recorded; the rest of a server's shapes is not."""

from __future__ import annotations

import pytest
from outrider.engines.accelerators.device.base import NotRecordedError
from outrider.engines.accelerators.device.recordings import Recordings
from outrider.engines.base import EngineError


class Log:
    """Runs by key, and how each was done."""

    def __init__(self, most: int) -> None:
        self.lines: list[str] = []
        self.recordings = Recordings("graph", most)

    def run(self, *keys: str) -> list[str]:
        """What the runs of these keys did."""
        self.lines.clear()
        for key in keys:
            self.recordings.run(
                key,
                lambda key=key: self.lines.append(f"run {key}"),
                lambda key=key: Kept(self, key),
            )
        return list(self.lines)


class Kept:
    """A recording that says what becomes of it."""

    def __init__(self, log: Log, key: str) -> None:
        self._log, self._key = log, key
        log.lines.append(f"record {key}")

    def launch(self) -> None:
        self._log.lines.append(f"launch {self._key}")

    def close(self) -> None:
        self._log.lines.append(f"close {self._key}")


def test_a_run_is_recorded_when_it_comes_again() -> None:
    log = Log(2)
    assert log.run("a", "a", "a", "b", "a") == [
        "run a",
        "record a",
        "launch a",
        "run b",
        "launch a",
    ]


def test_the_recording_that_was_not_used_for_longest_goes() -> None:
    log = Log(2)
    log.run("a", "a", "b", "b", "a")
    assert log.run("c", "c", "a", "b") == ["run c", "record c", "close b", "launch a", "run b"]


def test_keys_met_once_are_forgotten_in_time() -> None:
    log = Log(2)
    assert log.run("a", "b", "c", "a", "c") == ["run a", "run b", "run c", "run a", "record c"]


def test_closing_frees_everything() -> None:
    log = Log(2)
    log.run("a", "a", "b")
    log.lines.clear()
    log.recordings.close()
    assert log.lines == ["close a"]
    assert log.run("a", "b") == ["run a", "run b"]


def test_where_one_run_cannot_be_recorded_none_is_tried_again() -> None:
    log = Log(2)
    log.run("b", "b")
    log.lines.clear()

    def refuse() -> None:
        log.lines.append("record a")
        raise NotRecordedError("no")

    for _ in range(4):
        log.recordings.run("a", lambda: log.lines.append("run a"), refuse)
    assert log.lines == ["run a", "record a", "close b", "run a", "run a"]
    assert log.run("c", "c", "b", "b") == ["run c", "run c", "run b", "run b"]
    log.recordings.close()


def test_a_run_that_fails_is_no_run_that_cannot_be_recorded() -> None:
    log = Log(2)

    def fail() -> None:
        raise EngineError("out of memory")

    log.recordings.run("a", lambda: None, fail)
    with pytest.raises(EngineError, match="out of memory"):
        log.recordings.run("a", lambda: None, fail)
