"""Between a step's requests and the controller: rows in, gammas out, and what became of them.

Requests are rows by slot. A decision costs a tenth of a millisecond and more, and is good for as long
as the rows stay the same and little was learnt, so it is taken when rows change, and otherwise so rarely
that it stays below a share of the decoding time; where nothing pays, what holds is remembered. Steps
alike are answered without looking (``Rest``, ``Course``) and learnt from together. Rows whose prompt is
being read are decided on as if they decoded: what pays for one alone does not once others have joined.

A choice that fails harms no request: gammas are fixed for a while, and what was learnt of the rows
is forgotten.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from outrider.engines.sampling.base import Verdict
from outrider.runtime.core.request import Request
from outrider.runtime.drafters.base import Draft
from outrider.runtime.gamma.alike_steps import Course, Rest
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.gamma.forecast import Forecaster, Settings
from outrider.runtime.gamma.pace import Pace
from outrider.runtime.gamma.report import ControlReport
from outrider.runtime.gamma.rows import RowEvidence
from outrider.runtime.gamma.steering_rows import (
    are_behind,
    are_others,
    bounded,
    fixed_gammas,
    has_ended,
    held_back,
    known_gamma,
    plain_step_s,
    rows_fed,
    situation_of,
)
from outrider.runtime.gamma.untold_steps import MOST_UNTOLD, UntoldSteps

logger = logging.getLogger(__name__)

# Steps without drafts, in a row, after which what was seen before says less.
LONG_IDLE = 16
RETRY_S = 60.0
"""Seconds that gammas stay fixed after choosing them failed."""


class Steering:
    """Gammas for the adaptive requests of a worker; owned by its thread.

    Args:
        table: measured costs of the worker's engines.
        max_gamma: draft tokens of one row at most.
        num_slots: slots.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        chunk: tokens that rows are fed in one step to catch up, together.
        uses_model: whether a drafter, by name, calls the draft model.
        packs_rows: whether the engines' calls cost by the total of their tokens.
        are_waiting: whether requests wait for the slots of those that end.
        clock: seconds; deadlines are on it, and steps are timed by it.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        num_slots: int,
        max_shared_missing: int,
        chunk: int,
        uses_model: Callable[[str], bool],
        packs_rows: bool = False,
        are_waiting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._are_waiting = are_waiting
        self._clock = clock
        self._began_s = 0.0
        self._held_back: list[int] = []
        self._rest: Rest | None = None
        self._course: Course | None = None
        forecaster = Forecaster(
            table, max_gamma=max_gamma, max_shared_missing=max_shared_missing, settings=self._settings,
            chunk=chunk, packs_rows=packs_rows,
        )  # fmt: skip
        self._controller = Controller(
            forecaster, max_gamma=max_gamma, settings=self._settings, spread=table.disagreement
        )
        self._rows = RowEvidence(num_slots, max_gamma, uses_model)
        self._untold = UntoldSteps(prices_proposed=packs_rows)
        self._chosen: tuple[int | None, ...] = ()
        self._num_prefilling = 0
        self._most_missing = max_shared_missing
        self._catches_up = False
        self._is_drafting = False
        self._decided: tuple[Request, ...] = ()
        self._is_stale = True
        self._num_idle = 0
        self._kind = StepKind.NO_GAIN
        self._is_steering = self._is_resting = False
        self._pace = Pace(self._settings)
        self._retry_at_s: float | None = None
        self._plain_s = [plain_step_s(table, rows) for rows in range(num_slots + 1)]
        self._num_plain = self._served_s = 0.0

    def choose(
        self, live: Sequence[Request], caps: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Gammas of the next step.

        Args:
            live: request i holds slot i.
            caps: per slot, the most draft tokens it may take; None for rows that do not decode.
        """
        self._began_s = self._clock()
        course, rest = self._course, self._rest
        if course is not None:
            alike = course.next(live, caps)
            if alike is not None:
                self._catches_up, self._held_back = course.catches_up, course.held_back
                self._chosen = alike
                return alike
        self._is_resting = rest is not None and rest.holds(live, caps)
        if rest is not None and self._is_resting:
            if caps != rest.caps:
                rest.caps, self._held_back = caps, held_back(caps, rest.gammas)
            return rest.gammas
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
        self._end_alike()
        self._align(live, caps)
        self._is_steering = self._rows.has_adaptive
        if not self._is_steering:
            if not any(row.gamma for row in live) and None not in caps:
                self._rest = Rest(self._rows.live, caps, caps, math.inf)
            return caps
        controller = self._controller
        is_known = False
        if self._is_stale:
            # What waits was taken under the decision that may be left now.
            self._untold.tell(controller, self._rows)
            is_known = controller.recall(self._situation())
        if is_known:
            self._decided, self._is_stale = self._rows.live, False
        if self._must_decide() or self._pace.may_decide(is_drafting=controller.is_drafting):
            self._decide(caps)
            is_known = False
        gammas, kind = controller.next_step()
        self._kind = kind
        self._catches_up = False
        if self._num_idle > LONG_IDLE and any(gammas):
            self._learn()
            self._rows.age(self._num_idle)
        if self._is_stale:
            known = dict(zip(map(id, self._decided), gammas, strict=True))
            usual = max(gammas) if kind is StepKind.GAIN else 0
            gammas = [known_gamma(row, known, usual) for row in self._rows.live]
        self._held_back = [] if kind is StepKind.PROBE else held_back(caps, gammas)
        chosen = bounded(caps, gammas)
        self._chosen = chosen
        self._is_drafting = any(chosen)
        if self._is_drafting:
            self._num_idle = 0
            facts, most_missing = self._rows.facts, self._most_missing
            self._catches_up = are_behind(rows_fed(live, chosen, facts), most_missing)
            if kind is StepKind.GAIN and not (self._catches_up or self._is_stale):
                num_alike, left_s = controller.num_alike, self._pace.course_s
                if num_alike > 0 and left_s > 0.0 and None not in caps:
                    self._course = Course(live, gammas, facts, most_missing, num_alike, left_s)
        elif not (self._num_prefilling or self._is_stale) and controller.is_at_rest:
            left_s = min(controller.rest_s, self._pace.rest_s)
            self._rest = Rest(tuple(live), caps, chosen, left_s)
            self._is_resting = is_known
        self._num_idle += not (self._is_drafting or self._is_resting)
        self._began_s = self._clock()
        return chosen

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
        seconds = self._clock() - self._began_s
        self._num_plain += seconds / self._plain_s[len(judged)]
        if not (self._is_steering and judged):
            return
        for slot in self._held_back:
            live[slot].stats.num_off += 1
        if self._rest is not None and self._is_resting:
            self._rest.add(seconds)
            return
        self._served_s += seconds
        drafted = drafts if self._is_drafting else None
        self._untold.add(seconds, self._kind, self._catches_up, self._chosen, drafted, judged)
        course = self._course
        if course is not None:
            course.left_s -= seconds
        may_wait = course is not None or (
            self._controller.is_drafting and len(self._untold) < MOST_UNTOLD
        )
        if may_wait and not has_ended(live):
            return
        try:
            self._untold.tell(self._controller, self._rows)
        except Exception as error:  # what was not learnt harms nobody
            self._give_up(error)

    def _end_alike(self) -> None:
        """Tell of the steps since rows were last looked at."""
        course, self._course = self._course, None
        if course is not None:
            self._controller.skip(course.num_taken)
        self._pace.serve(self._served_s)
        self._served_s = 0.0
        rest, self._rest = self._rest, None
        if rest is not None and rest.seconds:
            self._pace.serve(sum(rest.seconds))
            self._num_idle += len(rest.seconds)
            self._controller.observe_rest(rest.seconds, num_rows=len(rest.live))

    def elapsed(self) -> float:
        """Time of steps so far, counted in plain steps of as many rows; callable from any thread."""
        return self._num_plain

    def report(self) -> ControlReport:
        """What the choices brought, the last steps of requests that go on left out; callable from any thread."""
        rest, told = self._rest, self._controller.report()
        num_untold = 0 if rest is None else len(rest.seconds)
        return replace(
            told, num_steps_off=told.num_steps_off + num_untold, cost_share=self._pace.share
        )

    def _give_up(self, error: Exception) -> None:
        """Say so, keep gammas fixed for a while, and begin with the rows anew after that."""
        logger.error("choosing gamma failed; it is fixed for %g s", RETRY_S, exc_info=error)
        self._retry_at_s = self._clock() + RETRY_S
        self._decided = ()
        self._rows.forget()
        self._untold.clear()
        self._rest = self._course = None

    def _must_decide(self) -> bool:
        """Whether drafts are due to be tried, or the rows are others."""
        if self._controller.is_due and not self._num_prefilling:
            return True
        return self._is_stale and are_others(self._rows.live, self._decided)

    def _align(self, live: Sequence[Request], caps: Sequence[int | None]) -> None:
        """Bring what is known of rows in line with the slots."""
        self._num_prefilling = caps.count(None)
        if self._rows.is_aligned(live):
            return
        self._learn()
        self._rows.align(live)
        self._is_stale = True

    def _learn(self) -> None:
        self._untold.tell(self._controller, self._rows)
        if self._rows.learn():
            self._controller.forget_settled()

    def _decide(self, caps: Sequence[int | None]) -> None:
        self._untold.tell(self._controller, self._rows)
        began_s = self._clock()
        self._learn()
        self._decided, self._is_stale = self._rows.live, False
        batch = self._rows.batch(caps, began_s, is_refilled=self._are_waiting())
        self._controller.decide(batch, situation=self._situation, may_try=not self._num_prefilling)
        took_s = self._clock() - began_s
        self._controller.charge(took_s)
        self._pace.decide(took_s)

    def _situation(self) -> Hashable:
        rows = self._rows
        return situation_of(rows.live, rows.facts, is_refilled=self._are_waiting())
