"""What an export says while it runs: its stages, and how far long ones are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Steps = Callable[[int, int], None]
"""Called with the steps of a phase that are done, and with all of them."""


def untold(done: int, num_steps: int) -> None:
    """Say nothing of a phase's steps."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Who hears of an export's stages, and of the steps of a long phase by its name."""

    tell: Callable[[str], None]
    report: Callable[[str, int, int], None] | None = None

    def steps(self, phase: str) -> Steps:
        """Return what is called after each step of a phase."""
        report = self.report
        if report is None:
            return untold
        return lambda done, num_steps: report(phase, done, num_steps)
