"""What is known of live rows, and what verification revealed of them, while requests come, go and move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.gamma.acceptance import AcceptanceBook, Round
from outrider.runtime.gamma.forecast import Batch
from outrider.runtime.gamma.steering_rows import Groups, RowFacts, batch_of, facts_of

MAX_GROUPS = 32
# Rounds of evidence that wait to be learnt from at most.
MAX_WAITING = 512


class RowEvidence:
    """Acceptance by slot; its owner is the worker's thread.

    Args:
        num_slots: slots.
        max_gamma: draft tokens of one row at most.
        uses_model: whether a drafter, by name, calls the draft model.

    Attributes:
        live: request i holds slot i, as last aligned.
        facts: that hold of them until they change.
        groups: of requests whose drafts fare alike.
        has_adaptive: whether gamma is chosen for some row.
    """

    def __init__(self, num_slots: int, max_gamma: int, uses_model: Callable[[str], bool]) -> None:
        self._book = AcceptanceBook(num_rows=num_slots, max_gamma=max_gamma, num_groups=MAX_GROUPS)
        self.groups = Groups(MAX_GROUPS)
        self.live: tuple[Request, ...] = ()
        self.facts = RowFacts([], [], [], math.inf, ())
        self._uses_model = uses_model
        self._num_cached = 0
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
        self.facts = facts_of(live, uses_model=self._uses_model, group=self.groups.of)

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

    def batch(self, caps: Sequence[int | None], now_s: float, *, is_refilled: bool) -> Batch:
        """The rows as the controller sees them; see ``batch_of``."""
        batch = batch_of(
            self.live,
            caps,
            self.facts,
            expected=self._book.expect(len(self.live)),
            num_cached=self._num_cached,
            now_s=now_s,
            is_refilled=is_refilled,
        )
        self._num_cached = batch.num_cached
        return batch

    def age(self, num_steps: int) -> None:
        """So many steps revealed nothing."""
        self._book.age(num_steps)

    def forget(self) -> None:
        """Begin with the rows anew."""
        self.live = ()
        self._speculations.clear()
        self._waiting.clear()
