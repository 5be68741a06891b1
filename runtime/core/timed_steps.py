"""Times of steps that wait to be learnt from together: learning costs more than a small model's step."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.core.step_times import StepTimes

# Steps that wait at most.
MAX_TIMED = 32


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
        self._waiting: dict[int, list[float]] = {}
        self._num_waiting = 0
        self._shapes: set[tuple[int, int]] = set()

    @property
    def is_full(self) -> bool:
        """Whether no more should wait."""
        return self._num_waiting >= MAX_TIMED

    def is_known(self, num_live: int, longest: int) -> bool:
        """Whether engines have run such a step before: the first of a shape allocates and plans."""
        shape = (num_live, longest)
        is_known = shape in self._shapes
        self._shapes.add(shape)
        return is_known

    def add(self, longest: int, ratios: Iterable[float]) -> None:
        """Steps of one kind, positive ratios."""
        waiting = self._waiting.setdefault(longest, [])
        before = len(waiting)
        waiting.extend(ratios)
        self._num_waiting += len(waiting) - before

    def learn(self, num_rows: int) -> bool:
        """Take in what waits, of steps over so many rows; whether anything did.

        Those of the kind seen most tell the level first.
        """
        if not self._num_waiting:
            return False
        for longest, ratios in sorted(self._waiting.items(), key=lambda one: -len(one[1])):
            self.learnt.learn(num_rows, longest, ratios)
        self._waiting.clear()
        self._num_waiting = 0
        return True
