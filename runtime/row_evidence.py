"""What verification revealed of live rows, kept slot by slot while requests come, go and move."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.acceptance import AcceptanceBook, Rates, Round
from runtime.core.request import Request, Speculation
from runtime.steering_rows import Groups

MAX_GROUPS = 32
# Rounds of evidence that wait to be learnt from at most.
MAX_WAITING = 512


class RowEvidence:
    """Acceptance by slot; its owner is the worker's thread.

    Args:
        num_slots: slots.
        max_gamma: draft tokens of one row at most.

    Attributes:
        live: request i holds slot i, as last aligned.
        groups: of requests whose drafts fare alike.
        has_adaptive: whether gamma is chosen for some row.
    """

    def __init__(self, num_slots: int, max_gamma: int) -> None:
        self._book = AcceptanceBook(num_rows=num_slots, max_gamma=max_gamma, num_groups=MAX_GROUPS)
        self.groups = Groups(MAX_GROUPS)
        self.live: tuple[Request, ...] = ()
        self.has_adaptive = False
        self._speculations: list[Speculation] = []
        self._waiting: list[Round] = []

    def is_aligned(self, live: Sequence[Request]) -> bool:
        """Whether these are the rows as they were aligned."""
        return self.live == tuple(live) and self._speculations == [row.speculation for row in live]

    def align(self, live: Sequence[Request]) -> None:
        """Bring the book's rows in line with the slots; what waits must have been learnt."""
        known = {id(owner): row for row, owner in enumerate(self.live)}
        former = dict(zip(map(id, self.live), self._speculations, strict=True))
        stayed = zip(live, self.live, self._speculations, strict=False)
        have_stayed = [new is old and new.speculation is one for new, old, one in stayed]
        # Slots move downwards only, so that ascending order never overwrites a row still needed.
        for slot, request in enumerate(live):
            if slot < len(have_stayed) and have_stayed[slot]:
                continue
            source = known.get(id(request))
            if source is None or former[id(request)] is not request.speculation:
                self._book.start(slot, self.groups.of(request))
            elif source != slot:
                self._book.move(source, slot)
        self.live = tuple(live)
        self._speculations = [row.speculation for row in live]
        self.has_adaptive = any(one.is_adaptive for one in self._speculations)

    def add(self, rounds: Sequence[Round]) -> None:
        """Rounds that were judged; they wait until they are learnt from."""
        self._waiting += rounds
        del self._waiting[:-MAX_WAITING]

    def learn(self) -> bool:
        """Take in what waits; whether anything did."""
        if not self._waiting:
            return False
        self._book.record(self._waiting)
        self._waiting.clear()
        return True

    def expect(self) -> tuple[Rates, float]:
        """[n, G] survival of the live rows' drafts, and how doubtful it is; see ``AcceptanceBook``."""
        return self._book.expect(len(self.live))

    def age(self, num_steps: int) -> None:
        """So many steps revealed nothing."""
        self._book.age(num_steps)

    def forget(self) -> None:
        """Begin with the rows anew."""
        self.live = ()
        self._speculations.clear()
        self._waiting.clear()
