"""Steps that are alike: rows are not looked at, and the controller is not asked, until they end.

Even a cheap look at the rows has to be fetched from memory that the engines have pushed out of the processor's
caches: at batch 1 it is a twentieth of a small model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.runtime.core.request import Request
from outrider.runtime.gamma.steering_rows import RowFacts, are_behind, bounded, held_back, rows_fed

# Steps at rest that are told at once: so many whatever may be due, and at most.
LEAST_REST, MOST_REST = 16, 256
# Steps with drafts that are answered alike at most.
MOST_COURSE = 16


@dataclass(slots=True)
class Rest:
    """Steps without drafts: the controller is told of them at once.

    Attributes:
        live: request i holds slot i.
        caps: as ``Steering.choose`` was last given.
        gammas: 0 for every row.
        left_s: seconds that it may still answer so without looking.
        seconds: of each step so far.
    """

    live: Sequence[Request]
    caps: tuple[int | None, ...]
    gammas: tuple[int | None, ...]
    left_s: float
    seconds: list[float] = field(default_factory=list)

    def holds(self, live: Sequence[Request], caps: tuple[int | None, ...]) -> bool:
        """Whether the next step is one of them, as far as caps only shrink."""
        count = len(self.seconds)
        if count >= LEAST_REST and (count >= MOST_REST or self.left_s <= 0.0):
            return False
        return live == self.live and None not in caps

    def add(self, seconds: float) -> None:
        """One of them is over."""
        self.seconds.append(seconds)
        self.left_s -= seconds


class Course:
    """Steps with drafts, of the gammas of one decision as far as caps let them.

    Args:
        live: request i holds slot i; all decode.
        gammas: of each, as decided.
        facts: of the rows.
        most_missing: tokens a row may miss and still be fed with the others.
        num_left: steps that it may still answer for.
        left_s: seconds until it is time to decide.

    Attributes:
        left_s: as above; its owner takes off what each step took.
        num_taken: steps so far.
        catches_up: whether the draft model is first fed what a row missed in the next step: one whose drafter had
            other ideas for a while has left it behind.
        held_back: rows that could draft and do not.
    """

    def __init__(
        self,
        live: Sequence[Request],
        gammas: Sequence[int],
        facts: RowFacts,
        most_missing: int,
        num_left: int,
        left_s: float,
    ) -> None:
        self._live, self._gammas = live, gammas
        self._facts, self._most_missing = facts, most_missing
        self._num_left, self.left_s = min(num_left, MOST_COURSE), left_s
        # How each is drafted for: a drafter that fails or pauses leaves its request another.
        self._drafted = [(row, row.speculation) for row in live]
        self._caps: tuple[int | None, ...] = ()
        self._chosen: tuple[int | None, ...] | None = None
        self._fed: list[Request] = []
        self.held_back: list[int] = []
        self.num_taken = 0
        self.catches_up = False

    def next(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...] | None:
        """Gammas of the next step if it is one of them, which then is taken; None where the course is over."""
        if self.num_taken >= self._num_left or self.left_s <= 0.0 or live != self._live:
            return None
        if caps != self._caps:
            self._bound(caps)
        if self._chosen is None:
            return None
        for row, speculation in self._drafted:
            if row.speculation is not speculation:
                return None
        self.catches_up = are_behind(self._fed, self._most_missing)
        self.num_taken += 1
        return self._chosen

    def _bound(self, caps: tuple[int | None, ...]) -> None:
        """Caps shrink towards the end of an answer; where they leave no drafts, the course is over."""
        chosen = bounded(caps, self._gammas)
        self._caps = caps
        self._chosen = chosen if any(chosen) and None not in caps else None
        self._fed = rows_fed(self._live, chosen, self._facts)
        self.held_back = held_back(caps, self._gammas)
