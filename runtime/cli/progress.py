"""Progress bars of long work (plan builds, analyses), one per phase that is under way."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class BuildProgress:
    """Shows on standard error what ``report`` is told; a context manager."""

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
        """Move the bar of a phase; at its last step the bar goes away."""
        with self._lock:
            if phase not in self._tasks:
                if step == num_steps:
                    return
                self._tasks[phase] = self._progress.add_task(phase, total=num_steps)
            self._progress.update(self._tasks[phase], completed=step)
            if step == num_steps:
                self._progress.remove_task(self._tasks.pop(phase))
