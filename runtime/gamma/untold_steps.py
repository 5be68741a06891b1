"""Steps that the controller was not told of yet: it learns from many at once, at a fraction of the price.

Between two steps the engines push everything else out of the processor's caches, so that to learn from one step
costs several times what it costs right after another.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.sampling.base import Verdict
from outrider.engines.trees import tree_layout
from outrider.runtime.drafters.base import Draft
from outrider.runtime.gamma.acceptance import Round
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.decision import Taken
from outrider.runtime.gamma.rows import RowEvidence

MOST_UNTOLD = 16
"""Steps that wait at most."""

Judged = Sequence[tuple[int, Verdict]]
Gammas = Sequence[int | None]
_Untold = tuple[float, StepKind, bool, Gammas, Sequence[Draft | None] | None, Judged]


class UntoldSteps:
    """In order; the owner is the worker's thread.

    Args:
        prices_proposed: whether a step costs what is proposed in it, so that what is asked for and not proposed counts;
            else each draft is taken for as long as was asked.
    """

    def __init__(self, *, prices_proposed: bool) -> None:
        self._prices_proposed = prices_proposed
        self._steps: list[_Untold] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        seconds: float,
        kind: StepKind,
        catches_up: bool,
        gammas: Gammas,
        drafts: Sequence[Draft | None] | None,
        judged: Judged,
    ) -> None:
        """A step is over.

        Args:
            seconds: it took.
            kind: what it was for.
            catches_up: whether a draft model was fed what it had missed.
            gammas: per slot, tokens asked for.
            drafts: per slot, what was verified; None where nothing was to be drafted.
            judged: slot and verdict of each row.
        """
        self._steps.append((seconds, kind, catches_up, gammas, drafts, judged))

    def clear(self) -> None:
        """What they showed is not wanted any more."""
        self._steps.clear()

    def tell(self, controller: Controller, rows: RowEvidence) -> None:
        """Tell of them: the controller, whose last decision they were taken under, and its rows' evidence."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        taken, revealed = [], []
        for seconds, kind, catches_up, gammas, drafts, judged in steps:
            num_emitted, longest, drafted = len(judged), 0, []
            for slot, verdict in judged:
                draft = None if drafts is None else drafts[slot]
                if draft is None:
                    continue
                asked = (gammas[slot] or 0) if self._prices_proposed else 0
                if draft.tokens:
                    depth = len(draft.tokens) if draft.parents is None else _depth(draft.parents)
                    num_called = 0 if draft.num_computed is None else depth
                    num_accepted, overlaps = verdict.num_accepted, verdict.overlaps
                    num_emitted += num_accepted
                    longest = max(longest, depth)
                    drafted.append((slot, depth, num_called))
                    asked = max(asked, depth)
                    revealed.append(Round(slot, asked, depth, num_called, num_accepted, overlaps))
                elif asked and draft.num_computed is None:
                    # A draft model that catches up says nothing of what it would propose.
                    revealed.append(Round(slot, asked, 0, 0, 0))
            taken.append(
                Taken(seconds, longest, num_emitted, len(judged), kind, catches_up, tuple(drafted))
            )
        rows.add(revealed)
        controller.observe_all(taken)


def _depth(parents: tuple[int, ...]) -> int:
    return int(tree_layout(parents).depths.max())
