"""Between a step's requests and the controller: rows in, gammas out, and what became of them.

Requests are rows by slot. A decision costs some tenths of a millisecond and is good for as long as
the rows stay the same and little was learnt, so it is taken when rows change, and otherwise so
rarely that it stays below a share of the decoding time. One newcomer among several rows follows the
others until the next decision.

A choice that fails harms no request: gammas are fixed for a while, and what was learnt of the rows
is forgotten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.laws import Verdict
from runtime.core.acceptance import AcceptanceBook, Round
from runtime.core.controller import Controller, StepKind
from runtime.core.costs import CostTable
from runtime.core.forecast import Forecaster, Settings
from runtime.core.ledger import ControlReport
from runtime.core.request import Request, Speculation
from runtime.drafters.base import Draft
from runtime.steering_rows import (
    batch_of,
    catches_up,
    depth_of,
    fixed_gammas,
    known_gamma,
    plain_step_s,
)

logger = logging.getLogger(__name__)

MAX_GROUPS = 32
# Rounds of evidence that wait for a decision at most.
MAX_WAITING = 512
# Where no more than one row in so many came or went, the decision stands until the next is due.
FEW = 4
RETRY_S = 60.0
"""Seconds that gammas stay fixed after choosing them failed."""


class Steering:
    """Gammas for the adaptive requests of a worker; owned by its thread.

    Args:
        table: measured costs of the worker's engines.
        max_gamma: draft tokens of one row at most.
        num_slots: slots.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        uses_model: whether a drafter, by name, calls the draft model.
        clock: seconds; deadlines are on it, and steps are timed by it.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        num_slots: int,
        max_shared_missing: int,
        uses_model: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._uses_model = uses_model
        self._clock = clock
        self._began_s = 0.0
        self._held_back: list[int] = []
        forecaster = Forecaster(
            table,
            max_gamma=max_gamma,
            max_shared_missing=max_shared_missing,
            settings=self._settings,
        )
        self._controller = Controller(
            forecaster, max_gamma=max_gamma, settings=self._settings, spread=table.disagreement
        )
        self._book = AcceptanceBook(num_rows=num_slots, max_gamma=max_gamma, num_groups=MAX_GROUPS)
        self._groups: dict[tuple[str, bool], int] = {}
        self._live: list[Request] = []
        self._speculations: list[Speculation] = []
        self._has_adaptive = False
        self._num_prefilling = 0
        self._slots: list[int] = []
        self._rows: list[Request] = []
        self._are_fed: list[bool] = []
        self._most_missing = max_shared_missing
        self._catches_up = False
        self._decided: list[Request] = []
        self._is_stale = True
        self._waiting: list[Round] = []
        self._num_cached = 0
        self._kind = StepKind.NO_GAIN
        self._is_steering = False
        self._decision_s = self._since_s = self._own_s = self._total_s = 0.0
        self._retry_at_s: float | None = None
        self._plain_s = [plain_step_s(table, rows) for rows in range(num_slots + 1)]
        self._num_plain = 0.0

    def choose(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Gammas of the next step.

        Args:
            live: request i holds slot i.
            caps: per slot, the most draft tokens it may take; None for rows that do not decode.
        """
        self._began_s = self._clock()
        if self._retry_at_s is None or self._began_s >= self._retry_at_s:
            self._retry_at_s = None
            try:
                return self._choose(live, caps)
            except Exception as error:  # whatever is wrong with the choice, rows do without
                self._give_up(error)
        self._is_steering = False
        return fixed_gammas(live, caps)

    def _choose(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        self._align(live, caps)
        self._is_steering = self._has_adaptive
        if not self._is_steering:
            return caps
        controller = self._controller
        if self._must_decide() or controller.is_due or self._may_decide():
            began = self._clock()
            self._decide(live, caps)
            took_s = self._clock() - began
            self._own_s += took_s
            # A decision that was disturbed must not keep the next one away for long.
            self._decision_s += 0.2 * (min(took_s, 0.01) - self._decision_s)
            self._since_s = 0.0
        gammas, self._kind = controller.next_step()
        if self._is_stale:
            known = dict(zip(map(id, self._decided), gammas, strict=True))
            usual = max(gammas) if self._kind is StepKind.GAIN else 0
            gammas = [known_gamma(row, known, usual) for row in self._rows]
        self._catches_up = catches_up(self._rows, self._are_fed, gammas, self._most_missing)
        self._held_back.clear()
        if 0 in gammas and self._kind is not StepKind.PROBE:
            chosen = zip(self._slots, gammas, strict=True)
            self._held_back += [slot for slot, gamma in chosen if not gamma and caps[slot]]
        if self._num_prefilling:
            by_slot = dict(zip(self._slots, gammas, strict=True))
            gammas = [by_slot.get(slot, 0) for slot in range(len(caps))]
        self._began_s = self._clock()
        pairs = zip(caps, gammas, strict=True)
        return tuple([cap if cap is None or cap < gamma else gamma for cap, gamma in pairs])

    def observe(
        self,
        live: Sequence[Request],
        drafts: Sequence[Draft | None],
        judged: Sequence[tuple[int, Verdict]],
    ) -> None:
        """Learn from the step last chosen for, which ends now.

        Args:
            live: as in ``choose``.
            drafts: per slot, what was verified; a tree counts as deep as it is, and what its width
                costs shows in the times.
            judged: slot and verdict of each row.
        """
        self._num_plain += (self._clock() - self._began_s) / self._plain_s[len(judged)]
        if not self._is_steering:
            return
        try:
            self._observe(live, drafts, judged)
        except Exception as error:  # what was not learnt harms nobody
            self._give_up(error)

    def _observe(
        self,
        live: Sequence[Request],
        drafts: Sequence[Draft | None],
        judged: Sequence[tuple[int, Verdict]],
    ) -> None:
        seconds = self._clock() - self._began_s
        longest = num_emitted = 0
        for slot, verdict in judged:
            draft = drafts[slot]
            num_accepted = verdict.num_accepted
            num_emitted += num_accepted + 1
            if draft is not None and draft.tokens:
                depth = len(draft.tokens) if draft.parents is None else depth_of(draft.parents)
                longest = max(longest, depth)
                self._waiting.append(Round(slot, depth, num_accepted, verdict.overlaps))
        for slot in self._held_back:
            live[slot].stats.num_off += 1
        del self._waiting[:-MAX_WAITING]
        self._since_s += seconds
        self._total_s += seconds
        self._controller.observe(
            seconds,
            longest,
            num_emitted,
            self._kind,
            num_rows=len(self._slots),
            catches_up=self._catches_up,
        )

    def elapsed(self) -> float:
        """Time of steps so far, counted in plain steps of as many rows; callable from any thread."""
        return self._num_plain

    def report(self) -> ControlReport:
        """What the choices brought; callable from any thread."""
        share = self._own_s / self._total_s if self._total_s else 0.0
        return replace(self._controller.report(), cost_share=share)

    def _give_up(self, error: Exception) -> None:
        """Say so, keep gammas fixed for a while, and begin with the rows anew after that."""
        logger.error("choosing gamma failed; it is fixed for %g s", RETRY_S, exc_info=error)
        self._retry_at_s = self._clock() + RETRY_S
        self._live.clear()
        self._speculations.clear()
        self._decided.clear()
        self._waiting.clear()

    def _must_decide(self) -> bool:
        """Whether the rows are others than those last decided on, beyond a few among many."""
        if not self._is_stale:
            return False
        known = set(map(id, self._decided))
        num_new = sum(id(row) not in known for row in self._rows)
        num_gone = len(known) - (len(self._rows) - num_new)
        return num_new + num_gone > len(self._rows) // FEW

    def _may_decide(self) -> bool:
        return self._decision_s <= self._settings.cost_share * self._since_s

    def _align(self, live: Sequence[Request], caps: Sequence[int | None]) -> None:
        """Bring the book's rows, and those that decode, in line with the slots."""
        speculations = [request.speculation for request in live]
        num_prefilling = caps.count(None)
        are_same = self._live == live and self._speculations == speculations
        if are_same and num_prefilling == self._num_prefilling == 0:
            return
        if not are_same:
            self._learn()
            self._move_rows(live, speculations)
        self._num_prefilling = num_prefilling
        self._slots = [slot for slot, cap in enumerate(caps) if cap is not None]
        rows = [live[slot] for slot in self._slots]
        # Rows that are being prefilled change nothing yet.
        if rows != self._rows or not are_same:
            self._is_stale = self._is_stale or rows != self._decided or not are_same
            self._rows = rows
            self._are_fed = [self._uses_model(row.speculation.drafter) for row in rows]

    def _move_rows(self, live: Sequence[Request], speculations: list[Speculation]) -> None:
        known = {id(owner): row for row, owner in enumerate(self._live)}
        former = dict(zip(map(id, self._live), self._speculations, strict=True))
        # Slots move downwards only, so that ascending order never overwrites a row still needed.
        for slot, request in enumerate(live):
            source = known.get(id(request))
            if source is None or former[id(request)] is not request.speculation:
                self._book.start(slot, self._group(request))
            elif source != slot:
                self._book.move(source, slot)
        self._live = list(live)
        self._speculations = speculations
        self._has_adaptive = any(one.is_adaptive for one in speculations)

    def _group(self, request: Request) -> int:
        """Requests of one drafter and temperature class share their traffic."""
        key = (request.speculation.drafter, request.spec.law.is_greedy)
        if len(self._groups) >= MAX_GROUPS - 1:
            return self._groups.get(key, MAX_GROUPS - 1)
        return self._groups.setdefault(key, len(self._groups))

    def _learn(self) -> None:
        self._book.record(self._waiting)
        self._waiting.clear()

    def _decide(self, live: Sequence[Request], caps: Sequence[int | None]) -> None:
        self._learn()
        self._decided = self._rows
        self._is_stale = False
        self._num_cached = max(self._num_cached, *(request.num_known for request in live))
        batch = batch_of(
            self._rows,
            [caps[slot] or 0 for slot in self._slots],
            uses_model=self._uses_model,
            survival=self._book.survival(len(live))[self._slots],
            num_live=len(live),
            num_cached=self._num_cached,
            now_s=self._clock,
        )
        self._controller.decide(batch)
