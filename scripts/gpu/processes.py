"""A piece of work in a process of its own, with a limit of time: whatever becomes of it, its caller goes on.

A library for a device may hang, or end the process that it runs in. The process is a fork, so the caller must not have
used the device itself. It leads a group of processes, which all end with it at the limit.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a piece of work gave, or in one line why it gave nothing."""

    value: T | None = None
    failure: str = ""


def run_apart(work: Callable[[], T], limit_s: float) -> Outcome[T]:
    """Run work in a fork of this process and return what came of it.

    At the limit the fork is killed, with all that it started. Work that was done by then counts, though its process
    does not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(work, file))
        process.start()
        try:
            process.join(limit_s)
            is_late = process.is_alive()
        finally:  # an interrupt from the keyboard does not reach another group
            _kill(process)
        if file.exists():
            outcome: Outcome[T] = pickle.loads(file.read_bytes())
            return outcome
    if is_late:
        return Outcome(failure=f"not done after {limit_s:g} s")
    code = process.exitcode or 0
    end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Outcome(failure=f"its process ended with {end}")


def _kill(process: BaseProcess) -> None:
    """Kill a process and its group, unless it has ended."""
    if process.is_alive():
        assert process.pid is not None
        with suppress(ProcessLookupError):  # no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _run(work: Callable[[], T], file: Path) -> None:
    os.setsid()
    try:
        outcome = Outcome(work())
    except Exception as error:  # of any library; its place is on stderr
        traceback.print_exc()
        outcome = Outcome(failure=" ".join(f"{type(error).__name__}: {error}".split()))
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(file)
