"""Steps that the controller was not told of yet: it learns from many at once, at a fraction of the price.

Between two steps the engines push everything else out of the processor's caches, so that to learn from one step
costs several times what it costs right after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.laws import Verdict
from runtime.core.controller import Controller, StepKind
from runtime.core.decision import Taken
from runtime.drafters.base import Draft
from runtime.row_evidence import RowEvidence
from runtime.steering_rows import judged_rounds

MOST_UNTOLD = 16
"""Steps that wait at most."""


class Untold(NamedTuple):
    """A step as it ended.

    Attributes:
        seconds: it took.
        kind: what it was for.
        catches_up: whether a draft model was fed what it had missed.
        drafts: per slot, what was verified; None where nothing was to be drafted.
        judged: slot and verdict of each row.
    """

    seconds: float
    kind: StepKind
    catches_up: bool
    drafts: Sequence[Draft | None] | None
    judged: Sequence[tuple[int, Verdict]]


class UntoldSteps:
    """In order; the owner is the worker's thread."""

    def __init__(self) -> None:
        self._steps: list[Untold] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Untold) -> None:
        """One is over."""
        self._steps.append(step)

    def clear(self) -> None:
        """What they showed is not wanted any more."""
        self._steps.clear()

    def tell(self, controller: Controller, rows: RowEvidence) -> None:
        """Tell of them: the controller, whose last decision they were taken under, and its rows' evidence."""
        steps, self._steps = self._steps, []
        taken = []
        for step in steps:
            rounds = [] if step.drafts is None else judged_rounds(step.drafts, step.judged)
            rows.add(rounds)
            longest = max((one.num_drafted for one in rounds), default=0)
            num_rows = len(step.judged)
            num_emitted = num_rows + sum(one.num_accepted for one in rounds)
            drafted = tuple([one[:2] for one in rounds])
            taken.append(
                Taken(
                    step.seconds,
                    longest,
                    num_emitted,
                    num_rows,
                    step.kind,
                    step.catches_up,
                    drafted,
                )
            )
        if taken:
            controller.observe_all(taken)
