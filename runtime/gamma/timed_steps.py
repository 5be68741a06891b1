"""Times of steps that wait to be learnt from together: learning costs more than a small model's step.

Those of steps with drafts wait until a plain step over about as many rows was timed, too: alone they would pass for
those of a slow machine, on which plain steps would be slow as well, and drafts that lose would be held to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from outrider.runtime.gamma.step_times import StepTimes, about

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
        if not ratios:
            return
        if is_plain:
            self._has_plain.add(about(num_rows))
        self._waiting.setdefault((num_rows, longest), []).extend(ratios)
        self._num_waiting += len(ratios)

    def learn(self) -> bool:
        """Take in what waits; whether anything did.

        Plain steps tell the level first: what steps with drafts differ by is the table's error.
        """
        waiting, known = self._waiting, self._has_plain
        if not waiting:
            return False
        ready = sorted([kind for kind in waiting if about(kind[0]) in known], key=itemgetter(1))
        kinds: list[tuple[int, list[float]]] = []
        for at, (num_rows, longest) in enumerate(ready, 1):
            kinds.append((longest, waiting.pop((num_rows, longest))))
            if at == len(ready) or ready[at][0] != num_rows:
                self.learnt.learn(num_rows, kinds)
                kinds = []
        for ratios in waiting.values():
            del ratios[:-MOST_KEPT]
        self._num_waiting = 0
        return bool(ready)
