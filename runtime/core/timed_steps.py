"""Times of steps that wait to be learnt from together: learning costs more than a small model's step.

Those of steps with drafts wait until a plain step over about as many rows was timed, too: alone they would pass for
those of a slow machine, on which plain steps would be slow as well, and drafts that lose would be held to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from runtime.core.step_times import StepTimes, about

# Steps that wait at most.
MAX_TIMED = 32
# Of a kind, where no plain step was timed.
MOST_KEPT = 4


class TimedSteps:
    """Measured over tabled times, by longest draft; the owner is the worker's thread.

    Args:
        max_gamma: G.
        spread: disagreement of the cost table's measurements, as a share.

    Attributes:
        learnt: what they taught.
    """

    def __init__(self, *, max_gamma: int, spread: float) -> None:
        self.learnt = StepTimes(max_gamma=max_gamma, spread=spread)
        # By rows and longest draft.
        self._waiting: dict[tuple[int, int], list[float]] = {}
        self._num_waiting = 0
        self._shapes: set[tuple[int, int]] = set()
        # About so many rows whose plain step was timed.
        self._has_plain: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether no more should wait."""
        return self._num_waiting >= MAX_TIMED

    def is_known(self, shape: tuple[int, int]) -> bool:
        """Whether engines have run such a step before: the first of a shape allocates and plans."""
        is_known = shape in self._shapes
        self._shapes.add(shape)
        return is_known

    def has_plain(self, num_rows: int) -> bool:
        """Whether a plain step over about so many rows was timed."""
        return about(num_rows) in self._has_plain

    def add(
        self, num_rows: int, longest: int, ratios: Sequence[float], *, is_plain: bool = False
    ) -> None:
        """Steps of one kind over so many rows, positive ratios; plain ones but for rows of a fixed gamma."""
        if is_plain and ratios:
            self._has_plain.add(about(num_rows))
        self._waiting.setdefault((num_rows, longest), []).extend(ratios)
        self._num_waiting += len(ratios)

    def learn(self) -> bool:
        """Take in what waits; whether anything did.

        Plain steps tell the level first: what steps with drafts differ by is the table's error.
        """
        ready = [kind for kind in self._waiting if self.has_plain(kind[0])]
        for kind in sorted(ready, key=itemgetter(1)):
            ratios = self._waiting.pop(kind)
            if ratios:
                self.learnt.learn(*kind, ratios)
        for ratios in self._waiting.values():
            del ratios[:-MOST_KEPT]
        self._num_waiting = 0
        return bool(ready)
