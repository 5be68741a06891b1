"""Between a step's requests and the controller: rows in, gammas out, and what became of them.

Requests are rows by slot. A decision costs some tenths of a millisecond and is good for as long as
the rows stay the same and little was learnt, so it is taken when rows change, and otherwise so
rarely that it stays below a share of the decoding time. Among many rows, a newcomer waits for the
next decision without drafts.

A choice that fails harms no request: gammas are fixed for a while, and what was learnt of the rows
is forgotten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engines.laws import ExactnessMode, Verdict
from engines.trees import tree_layout
from runtime.core.acceptance import AcceptanceBook, Round
from runtime.core.controller import Controller, StepKind
from runtime.core.costs import CostTable, RowKind
from runtime.core.forecast import KINDS, Batch, Forecaster, Settings
from runtime.core.ledger import ControlReport
from runtime.core.request import Request, Speculation
from runtime.drafters.base import Draft

logger = logging.getLogger(__name__)

MAX_GROUPS = 32
# Rounds of evidence that wait for a decision at most.
MAX_WAITING = 512
# From so many rows on, one that comes or goes among them waits for the next decision.
MANY_ROWS = 8
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
        self._max_gamma = max_gamma
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
        self._controller = Controller(forecaster, max_gamma=max_gamma, settings=self._settings)
        self._book = AcceptanceBook(num_rows=num_slots, max_gamma=max_gamma, num_groups=MAX_GROUPS)
        self._groups: dict[tuple[str, bool], int] = {}
        self._owners: list[tuple[Request, Speculation]] = []
        self._decoding: tuple[bool, ...] = ()
        self._slots: list[int] = []
        self._decided: list[Request] = []
        self._is_stale = True
        self._waiting: list[Round] = []
        self._num_cached = 0
        self._kind = StepKind.NO_GAIN
        self._is_steering = False
        self._decision_s = 0.0
        self._since_s = 0.0
        self._own_s = 0.0
        self._total_s = 0.0
        self._retry_at_s: float | None = None

    def choose(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Gammas of the next step.

        Args:
            live: request i holds slot i.
            caps: per slot, the most draft tokens it may take; None for rows that do not decode.
        """
        self._is_steering = any(request.speculation.is_adaptive for request in live)
        if not self._is_steering:
            return caps
        if self._retry_at_s is None or self._clock() >= self._retry_at_s:
            self._retry_at_s = None
            try:
                return self._choose(live, caps)
            except Exception as error:  # whatever is wrong with the choice, rows do without
                self._give_up(error)
        self._is_steering = False
        return _fixed_gammas(live, caps)

    def _choose(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        decoding = tuple(cap is not None for cap in caps)
        if self._align(live) or decoding != self._decoding:
            self._decoding = decoding
            self._slots = [slot for slot, is_decoding in enumerate(decoding) if is_decoding]
            self._is_stale = True
        if self._must_decide() or self._controller.is_due or self._may_decide():
            began = self._clock()
            self._decide(live, caps)
            took_s = self._clock() - began
            self._own_s += took_s
            # A decision that was disturbed must not keep the next one away for long.
            self._decision_s += 0.2 * (min(took_s, 0.01) - self._decision_s)
            self._since_s = 0.0
        decided, self._kind = self._controller.next_step()
        gammas: list[int] = decided.tolist()
        if self._is_stale:
            known = dict(zip(map(id, self._decided), gammas, strict=True))
            gammas = [_known_gamma(live[slot], known) for slot in self._slots]
        chosen: list[int | None] = [None] * len(live)
        self._held_back.clear()
        for slot, gamma in zip(self._slots, gammas, strict=True):
            cap = caps[slot] or 0
            chosen[slot] = min(cap, gamma)
            if cap and not gamma and self._kind is not StepKind.PROBE:
                self._held_back.append(slot)
        self._began_s = self._clock()
        return tuple(chosen)

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
            num_emitted += verdict.num_accepted + 1
            if draft is not None and draft.tokens:
                num_drafted = _depth(draft)
                longest = max(longest, num_drafted)
                self._waiting.append(
                    Round(slot, num_drafted, verdict.num_accepted, verdict.overlaps)
                )
        for slot in self._held_back:
            live[slot].stats.num_off += 1
        del self._waiting[:-MAX_WAITING]
        self._since_s += seconds
        self._total_s += seconds
        self._controller.observe(
            seconds, longest, num_emitted, self._kind, num_rows=len(self._slots)
        )

    def report(self) -> ControlReport:
        """What the choices brought; callable from any thread."""
        share = self._own_s / self._total_s if self._total_s else 0.0
        return replace(self._controller.report(), cost_share=share)

    def _give_up(self, error: Exception) -> None:
        """Say so, keep gammas fixed for a while, and begin with the rows anew after that."""
        logger.error("choosing gamma failed; it is fixed for %g s", RETRY_S, exc_info=error)
        self._retry_at_s = self._clock() + RETRY_S
        self._owners.clear()
        self._decided.clear()
        self._waiting.clear()

    def _must_decide(self) -> bool:
        """Whether the rows are others than those last decided on, beyond a few among many."""
        if not self._is_stale:
            return False
        num_rows, num_decided = len(self._slots), len(self._decided)
        return num_rows < MANY_ROWS or abs(num_rows - num_decided) > num_rows // MANY_ROWS

    def _may_decide(self) -> bool:
        return self._decision_s <= self._settings.cost_share * self._since_s

    def _align(self, live: Sequence[Request]) -> bool:
        """Bring the book's rows in line with the slots; True if anything changed."""
        owners = self._owners
        if len(owners) == len(live) and all(
            request is owner and request.speculation is speculation
            for request, (owner, speculation) in zip(live, owners, strict=True)
        ):
            return False
        self._learn()
        rows = {id(owner): row for row, (owner, _) in enumerate(owners)}
        # Slots move downwards only, so that ascending order never overwrites a row still needed.
        for slot, request in enumerate(live):
            source = rows.get(id(request))
            if source is None:
                self._book.start(slot, self._group(request))
            elif source != slot:
                self._book.move(source, slot)
        self._owners = [(request, request.speculation) for request in live]
        return True

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
        rows = [live[slot] for slot in self._slots]
        self._decided = rows
        self._is_stale = False
        uses_model = np.array([self._uses_model(row.speculation.drafter) for row in rows])
        missing = np.array([row.num_known - row.draft_computed for row in rows])
        self._num_cached = max(self._num_cached, *(request.num_known for request in live))
        deadlines = [r.spec.deadline_s for r in rows if r.spec.deadline_s is not None]
        survival = self._book.survival(len(live))
        self._controller.decide(
            Batch(
                caps=np.array([caps[slot] for slot in self._slots], dtype=np.int64),
                is_fixed=np.array([not row.speculation.is_adaptive for row in rows]),
                uses_model=uses_model,
                kinds=np.array([_kind(row) for row in rows]),
                num_missing=np.where(uses_model, missing, 0),
                num_remaining=np.array([row.num_remaining for row in rows]),
                survival=survival[self._slots],
                num_live=len(live),
                num_cached=self._num_cached,
                time_left_s=min(deadlines) - self._clock() if deadlines else None,
            )
        )


def _fixed_gammas(live: Sequence[Request], caps: Sequence[int | None]) -> tuple[int | None, ...]:
    """As if nothing were ever chosen."""
    return tuple(
        cap
        if cap is None or (fixed := request.speculation.fixed_gamma) is None
        else min(cap, fixed)
        for request, cap in zip(live, caps, strict=True)
    )


def _known_gamma(request: Request, known: dict[int, int]) -> int:
    """As decided; a newcomer that has no gamma of its own does without drafts until then."""
    return known.get(id(request), 0 if request.speculation.is_adaptive else request.gamma)


def _depth(draft: Draft) -> int:
    """Tokens of the draft's longest path."""
    if draft.parents is None:
        return len(draft.tokens)
    return int(tree_layout(draft.parents).depths.max())


def _kind(request: Request) -> int:
    if request.spec.law.is_greedy:
        return KINDS.index(RowKind.GREEDY)
    is_stable = request.spec.speculation.mode is ExactnessMode.SEED_STABLE
    return KINDS.index(RowKind.STABLE if is_stable else RowKind.SAMPLED)
