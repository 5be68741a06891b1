"""Progress on standard error: bars of long work by phase, and stages of a start that take seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# The live line of a stage: seldom enough to leave measured step costs alone.
STAGE_REFRESHES_PER_S = 2
# Of long work without a terminal: enough to see that it goes on, and not to fill a log.
LINE_EVERY_S = 10.0
COMPILING = "compiling loops for this machine (kept for later starts)"


class _Told(Console):
    """Standard error, for lines that nobody's work waits for: a full disk or a reader that is gone loses them."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, if that is possible."""
        with suppress(OSError):
            super().print(*objects, **options)


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Show that the block is under way, and at its end how many seconds it took.

    A terminal has a live line meanwhile; elsewhere a line says that the block begins.
    """
    console = _Told()
    if not console.is_terminal:
        console.print(f"outrider: {text} ...", soft_wrap=True, highlight=False)
    line = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=STAGE_REFRESHES_PER_S,
        disable=not console.is_terminal,
    )
    began = time.perf_counter()
    with line:
        line.add_task(text, total=None)
        yield
    seconds = time.perf_counter() - began
    console.print(f"outrider: {text}: {seconds:.1f} s", soft_wrap=True, highlight=False)


@contextmanager
def compile_stage(
    stage: Callable[[str], AbstractContextManager[None]] = stage,
) -> Iterator[None]:
    """Show a ``stage`` from the first loop that is compiled to the end of the block; none if all are in the cache."""
    from outrider.engines.jit import watch_compiling

    with ExitStack() as shown, watch_compiling(lambda: shown.enter_context(stage(COMPILING))):
        yield


def duration(seconds: float) -> str:
    """Return a length of time in words, as exact as a guess deserves: "40 s", "12 min", "1.5 h"."""
    if seconds < 90.0:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.1f} h"


class BuildProgress:
    """Shows a bar for each phase that ``report`` names, or lines where there is no terminal; a context manager.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = _Told()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._clock = clock
        # By phase, when it began and when its last line was printed.
        self._begun_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        # The builder reports from threads of its own.
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def report(self, phase: str, step: int, num_steps: int) -> None:
        """Move the bar of a phase, whose last step removes it; or print a line now and then, and the last one."""
        with self._lock:
            if self._console.is_terminal:
                self._move(phase, step, num_steps)
            else:
                self._print(phase, step, num_steps)

    def _move(self, phase: str, step: int, num_steps: int) -> None:
        if phase not in self._tasks:
            if step == num_steps:
                return
            self._tasks[phase] = self._progress.add_task(phase, total=num_steps)
        self._progress.update(self._tasks[phase], completed=step)
        if step == num_steps:
            self._progress.remove_task(self._tasks.pop(phase))

    def _print(self, phase: str, step: int, num_steps: int) -> None:
        now_s = self._clock()
        begun_s = self._begun_s.setdefault(phase, now_s)
        is_last = step == num_steps
        if is_last or now_s - self._told_s.get(phase, -math.inf) >= LINE_EVERY_S:
            self._told_s[phase] = now_s
            line = f"outrider: {phase}: {step} of {num_steps}{'' if is_last else ' ...'}"
            if step and not is_last and now_s > begun_s:
                line += f" about {duration((now_s - begun_s) / step * (num_steps - step))} left"
            self._console.print(line, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(f"outrider: {text}", soft_wrap=True, highlight=False, markup=False)

    def expect(self, work: str, seconds: float) -> None:
        """Say how long work will take in all."""
        self.say(f"{work}: about {duration(seconds)}; --quick takes less")


class ExportProgress(BuildProgress):
    """Shows an export: a line as each stage begins, with the seconds since the first, and the steps of long phases.

    A terminal has a live line of the stage that is under way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._began_s = clock()
        self._stage: str | None = None

    def stage(self, text: str) -> None:
        """Say that a stage begins, which ends the one before."""
        with self._lock:
            seconds = self._clock() - self._began_s
            line = f"export: {seconds:6.1f} s  {text}"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
            if self._console.is_terminal:
                if self._stage is not None:
                    self._progress.remove_task(self._tasks.pop(self._stage))
                self._stage = text
                self._tasks[text] = self._progress.add_task(text, total=1)
