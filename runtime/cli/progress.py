"""Progress on standard error: bars of long work by phase, and stages of a start that take seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# The live line of a stage: seldom enough to leave measured step costs alone.
STAGE_REFRESHES_PER_S = 2
COMPILING = "compiling loops for this machine (kept for later starts)"


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Show that the block is under way, and at its end how many seconds it took.

    A terminal has a live line meanwhile; elsewhere a line says that the block begins.
    """
    console = Console(stderr=True)
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
def compile_stage() -> Iterator[None]:
    """Show a ``stage`` from the first loop that is compiled to the end of the block; none if all are in the cache."""
    from outrider.engines.jit import watch_compiling

    with ExitStack() as shown, watch_compiling(lambda: shown.enter_context(stage(COMPILING))):
        yield


class BuildProgress:
    """Shows a bar for each phase that ``report`` names; a context manager."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
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
        """Move the bar of a phase; its last step removes it."""
        with self._lock:
            if phase not in self._tasks:
                if step == num_steps:
                    return
                self._tasks[phase] = self._progress.add_task(phase, total=num_steps)
            self._progress.update(self._tasks[phase], completed=step)
            if step == num_steps:
                self._progress.remove_task(self._tasks.pop(phase))
