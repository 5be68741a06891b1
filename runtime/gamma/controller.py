"""Chooses the draft tokens of every row before each step, and learns from what became of them.

The one mutable owner of ``runtime.gamma``; the worker's thread calls it, with a clock that is an argument. A decision
is taken when rows change, and otherwise as often as keeps deciding below a share of the time served. Between decisions
most steps do what was decided. Some measure what the choice cannot know: a *probe* is a few plain steps while drafts
are made, a *try* a few drafts of one row while none are made.

A choice that fails harms no request: gammas are fixed for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from outrider.engines.sampling.base import Verdict
from outrider.engines.trees import tree_layout
from outrider.runtime.core.drafting import AUTO
from outrider.runtime.core.request import Request
from outrider.runtime.core.stats import ControlReport, DrafterVerdict
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.compose import NONE
from outrider.runtime.gamma import guard
from outrider.runtime.gamma.acceptance import MOST_GROUPS, Acceptance, Group, Round
from outrider.runtime.gamma.choose import Options, Rows, options_of
from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.gamma.report import GammaStats
from outrider.runtime.gamma.step_times import StepTimes
from outrider.runtime.gamma.verdicts import LEAST_TRIALS, least_alpha

logger = logging.getLogger(__name__)

Gammas = tuple[int | None, ...]  # per slot; None for rows that do not decode
MARGIN = (
    0.02  # share that another length must promise more, so that near-equal choices do not alternate
)
LEAD = 0.06
"""Share that drafts must promise where several rows decode and nobody waits for their slots: rows that run ahead leave
early, and the others go on in a smaller batch, at a higher price per token. With .03 one cell of 72 of the demo pair
fell below .93 of plain decoding (0.1.0, float32, batch 8, prose), with .06 none."""
DECIDE_EVERY = 2  # steps between two decisions over the same rows at least
COST_SHARE = 0.005  # of the time served, that decisions may take
MOST_ROUNDS = 512  # that wait for the next decision: a group forgets older ones anyway
HORIZON = 128  # tokens of an answer over which feeding the draft model what it missed must pay
RETRY_S = 60.0  # seconds that gammas stay fixed after choosing them failed


@dataclass(slots=True)
class Decision:
    """What was decided for the rows last seen, and when to decide anew.

    Attributes:
        gammas: by internal id.
        longest: draft of these; rows that came since take it.
        load: power of two of the rows, and their groups.
        is_due: whether these rows want another one, once no prompts are read.
        num_steps: since then.
        owed_s: seconds that decisions took beyond their share of the time served.
        decide_by_s: on the clock, when a deadline comes near.
    """

    gammas: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    load: tuple[int, set[Group]] = field(default_factory=lambda: (0, set()))
    is_due: bool = True
    num_steps: int = 0
    owed_s: float = 0.0
    decide_by_s: float = np.inf


@dataclass(slots=True)
class Measurement:
    """The probe or the try under way, and when the next one begins.

    Attributes:
        is_probe: whether the step under way is a plain one of a probe.
        tried_row: the slot that it drafts for alone, to try it; None where it tries none.
        num_left: steps of the probe or try behind it.
        num_idle: steps in which the tried row may still be drafted nothing for.
        until_probe: steps with drafts before the next probe.
        num_plain: plain steps in a row.
        num_tries: by group.
        try_at_s: saved seconds from which on another try is looked for.
    """

    is_probe: bool = False
    tried_row: int | None = None
    num_left: int = 0
    num_idle: int = 0
    until_probe: int = guard.FIRST_PROBE
    num_plain: int = 0
    num_tries: dict[Group, int] = field(default_factory=dict)
    try_at_s: float = 0.0

    def stop(self) -> None:
        """Measure no more: the next step does what was decided."""
        self.is_probe, self.tried_row, self.num_left = False, None, 0


@dataclass(slots=True)
class ChosenStep:
    """The step under way.

    Attributes:
        began_s: on the clock, once it was chosen.
        is_chosen: whether its gammas were chosen, not fixed.
        gammas: that were chosen, per slot.
        catch_up_s: seconds in which it feeds the draft model what rows missed.
    """

    began_s: float = 0.0
    is_chosen: bool = False
    gammas: Gammas = ()
    catch_up_s: float = 0.0


class Controller:
    """Gammas for the adaptive requests of a worker.

    Args:
        table: measured costs of the worker's engines.
        max_gamma: G, draft tokens of one row at most, with those that default drafters put behind gamma.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        uses_model: returns True for the name of a drafter that calls the draft model.
        packs_rows: True where the engines' calls cost by the total of their tokens.
        leaves_out: True where the draft model reads the end of a long prompt alone.
        are_waiting: returns True while requests wait for the slots of those that end.
        default_drafter: whose verdict is reported before any request.
        clock: seconds; deadlines are on it, and steps are timed by it.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        max_shared_missing: int,
        uses_model: Callable[[str], bool],
        packs_rows: bool = False,
        leaves_out: bool = False,
        are_waiting: Callable[[], bool] = lambda: False,
        default_drafter: str = NONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times = StepTimes(
            table,
            max_gamma=max_gamma,
            max_shared_missing=max_shared_missing,
            uses_model=uses_model,
            packs_rows=packs_rows,
            leaves_out=leaves_out,
        )
        self._acceptance = Acceptance(max_gamma)
        self._budgets = guard.Budgets()
        self._stats = GammaStats(max_gamma)
        self._max_gamma, self._are_waiting, self._clock = max_gamma, are_waiting, clock
        self._rows: tuple[Request, ...] = ()  # last seen
        self._decision = Decision()
        self._measurement = Measurement()
        self._step = ChosenStep()
        self._rounds: list[Round] = []
        self._fixed_until_s = -np.inf
        self._elapsed, self._default_drafter = 0.0, default_drafter

    def choose(self, live: Sequence[Request], caps: Gammas) -> Gammas:
        """Return the gammas of the next step.

        Args:
            live: request i holds slot i.
            caps: the most draft tokens that each slot may take.
        """
        step = self._step
        step.began_s, step.is_chosen = self._clock(), False
        if step.began_s >= self._fixed_until_s:
            try:
                return self._choose(live, caps)
            except Exception as error:  # whatever is wrong with the choice, rows do without
                self._give_up(error)
        fixed = [row.speculation.fixed_gamma for row in live]
        return tuple(
            cap if cap is None or gamma is None else min(cap, gamma)
            for cap, gamma in zip(caps, fixed, strict=True)
        )

    def observe(
        self,
        live: Sequence[Request],
        drafts: Sequence[Draft | None],
        judged: Sequence[tuple[int, Verdict]],
    ) -> None:
        """Learn from the step last chosen for, which ends now.

        Args:
            live: as in ``choose``.
            drafts: per slot, what was verified; a tree counts as deep as it is.
            judged: slot and verdict of each row.
        """
        seconds = self._clock() - self._step.began_s
        if judged:
            self._elapsed += seconds / self._times.plain_s(len(judged))
        if judged and self._step.is_chosen:
            try:
                self._observe(live, drafts, judged, seconds)
            except Exception as error:  # what was not learnt harms nobody
                self._give_up(error)

    def elapsed(self) -> float:
        """Return the time of steps so far, in plain steps of as many rows; callable from any thread."""
        return self._elapsed

    def report(self) -> ControlReport:
        """Return what the choices brought; callable from any thread."""
        return replace(self._stats.report(), verdicts=tuple(self._verdicts()))

    def _verdicts(self) -> Iterator[DrafterVerdict]:
        found: dict[str, dict[bool, tuple[float, float]]] = {self._default_drafter: {}}
        for (drafter, is_greedy), counts in self._acceptance.kept().items():
            found.setdefault(drafter, {})[is_greedy] = counts
        for name in (NONE, AUTO):  # requests get one of the others
            found.pop(name, None)
        num_rows = max(1, len(self._rows))
        for drafter, by_kind in found.items():
            hits, judged = map(sum, zip((0.0, 0.0), *by_kind.values(), strict=True))
            is_greedy = max(by_kind, key=lambda one: by_kind[one][1], default=True)
            kind = RowKind.GREEDY if is_greedy else RowKind.SAMPLED
            yield DrafterVerdict(
                drafter=drafter,
                alpha=hits / judged if judged >= LEAST_TRIALS else None,
                least_alpha=least_alpha(self._times.steps_s(drafter, kind, num_rows)),
                num_rows=num_rows,
            )

    def _choose(self, live: Sequence[Request], caps: Gammas) -> Gammas:
        self._align(live)
        if not any(row.speculation.is_adaptive for row in self._rows):
            return caps
        step, decision = self._step, self._decision
        step.is_chosen = True
        is_paid = decision.num_steps >= DECIDE_EVERY and decision.owed_s <= 0.0
        # While prompts are read, more rows are about to decode, and to be decided on.
        is_due = decision.is_due and (None not in caps or not decision.gammas)
        if is_due or is_paid or step.began_s > decision.decide_by_s:
            self._decide(caps)
        decision.num_steps += 1
        self._begin_measuring(caps)
        chosen, step.catch_up_s = list(caps), 0.0
        for slot, (row, cap) in enumerate(zip(self._rows, caps, strict=True)):
            if not cap:
                continue
            if row.speculation.is_adaptive:
                gamma = chosen[slot] = min(cap, self._gamma_of(slot))
                row.stats.num_off += gamma == 0 and not self._measurement.is_probe
            if chosen[slot]:
                step.catch_up_s += self._times.missed_s(row)
        step.gammas = tuple(chosen)
        step.began_s = self._clock()
        return step.gammas

    def _gamma_of(self, slot: int) -> int:
        if self._measurement.is_probe:
            return 0
        if self._measurement.tried_row is not None:
            return int(slot == self._measurement.tried_row)
        # Rows that came since the decision take what is usual until the next.
        return self._decision.gammas.get(self._rows[slot].spec.internal_id, self._decision.longest)

    def _align(self, live: Sequence[Request]) -> None:
        """Take note of the live rows; those like the ones decided on do what is usual until the next decision."""
        if self._rows == tuple(live):
            return
        self._rows = tuple(live)
        load = guard.load_of(len(live)), {_group(row) for row in live}
        decision, measurement = self._decision, self._measurement
        # Fewer rows than were decided on are no reason for haste.
        decision.is_due |= load[0] > decision.load[0] or load[1] != decision.load[1]
        decision.load, decision.num_steps = load, DECIDE_EVERY
        if measurement.tried_row is not None:
            measurement.num_left = 0

    def _decide(self, caps: Gammas) -> None:
        """Choose gammas for the live rows; those whose prompt is being read as if they decoded."""
        began_s = self._clock()
        rows, num_rows, times = self._rows, len(self._rows), self._times
        decision = self._decision
        self._acceptance.record(self._rounds)
        self._rounds.clear()
        self._acceptance.keep_only({row.spec.internal_id for row in rows})
        most, catch_up = [], []
        for row, cap in zip(rows, caps, strict=True):
            left = row.sequence.num_remaining
            most.append(max(0, min(row.speculation.gamma, left - 1)) if cap is None else cap)
            pays = row.speculation.is_adaptive
            catch_up.append(times.missed_s(row) / min(max(left, 1), HORIZON) if pays else 0.0)
        hosts = [times.host(row) for row in rows]
        options = options_of(
            Rows(
                np.array(most, dtype=np.int64),
                np.array([not row.speculation.is_adaptive for row in rows]),
                np.array([times.uses_model(row) for row in rows]),
                sum([host.row_s for host in hosts]),
                np.array([host.token_s for host in hosts]),
                np.array(catch_up),
                np.array([row.speculation.num_behind for row in rows], dtype=np.int64),
            ),
            self._acceptance.expect([(row.spec.internal_id, _group(row)) for row in rows]),
            times.of_rows(rows, num_rows),
            [times.ratios.of(num_rows, longest) for longest in range(self._max_gamma + 1)],
        )
        self._stats.consider(np.array([options.tokens, options.seconds]))
        is_open = self._budgets.of(num_rows, times.plain_s(num_rows)).is_open
        longest = decision.longest = self._best(options, began_s) if is_open else 0
        gammas = options.gammas[longest].tolist()
        decision.gammas = dict(zip([row.spec.internal_id for row in rows], gammas, strict=True))
        decision.num_steps, decision.is_due, self._measurement.try_at_s = 0, False, 0.0
        took_s = self._clock() - began_s
        decision.owed_s += took_s
        self._stats.decided(took_s)

    def _best(self, options: Options, now_s: float) -> int:
        """Return the longest draft of the best rate; the one in use keeps its place within a margin."""
        rates, longest = options.tokens / options.seconds, self._decision.longest
        deadlines = [row.spec.deadline_s for row in self._rows]
        left_s = min([one - now_s for one in deadlines if one is not None], default=np.inf)
        rates[1:][options.seconds[1:] > left_s] = 0.0
        # While the longest of these steps still fits, no deadline is near.
        self._decision.decide_by_s = now_s + left_s - 2.0 * float(options.seconds.max())
        if len(self._rows) > 1 and not self._are_waiting():
            rates[0] *= 1.0 + LEAD
        elif longest == 0:
            rates[0] *= 1.0 + MARGIN
        best = int(rates.argmax())
        is_better = rates[best] > rates[longest] * (1.0 + MARGIN)
        return best if is_better or best == 0 else longest

    def _begin_measuring(self, caps: Gammas) -> None:
        """Go on with the probe or the try under way, or begin one where it is due."""
        measurement, decision = self._measurement, self._decision
        is_over = measurement.tried_row is not None and decision.longest > 0
        if measurement.num_left and not is_over:
            measurement.num_left -= 1
            return
        # The results of a try are decided on in the next step.
        decision.is_due |= measurement.tried_row is not None
        measurement.stop()
        if decision.longest:
            measurement.until_probe -= 1
            if measurement.until_probe <= 0:
                measurement.is_probe, measurement.num_left = True, guard.PROBE_STEPS - 1
                measurement.until_probe = guard.PROBE_EVERY
        elif None not in caps and not decision.is_due:
            self._begin_try(caps)

    def _begin_try(self, caps: Gammas) -> None:
        """Draft single tokens of one row for some steps, where enough was saved for what that may lose."""
        num_rows, times, measurement = len(self._rows), self._times, self._measurement
        saved_s = self._budgets.of(num_rows, times.plain_s(num_rows)).saved_s
        if saved_s < measurement.try_at_s:
            return
        num_tries = measurement.num_tries
        rows = [
            (num_tries.get(_group(row), 0), times.missed_s(row), slot)
            for slot, (row, cap) in enumerate(zip(self._rows, caps, strict=True))
            if cap
            and row.speculation.is_adaptive
            and row.sequence.num_remaining > guard.TRY_STEPS + 2
        ]
        plain_s, one_s = times.drafted_s(num_rows, 0), times.drafted_s(num_rows, 1)
        num_before, missed_s, slot = min(rows, default=(0, plain_s, 0))
        measurement.try_at_s = guard.TRY_STEPS * max(0.0, one_s - plain_s) + missed_s
        if rows and saved_s >= max(measurement.try_at_s, plain_s * guard.LOST_SHARE):
            group = _group(self._rows[slot])
            self._acceptance.soften(group)
            num_tries.pop(group, None)
            num_tries[group] = num_before + 1
            if len(num_tries) > MOST_GROUPS:
                del num_tries[next(iter(num_tries))]
            measurement.tried_row, measurement.num_left = slot, guard.TRY_STEPS - 1
            measurement.num_idle = guard.IDLE_STEPS

    def _observe(
        self,
        live: Sequence[Request],
        drafts: Sequence[Draft | None],
        judged: Sequence[tuple[int, Verdict]],
        seconds: float,
    ) -> None:
        step, decision, measurement = self._step, self._decision, self._measurement
        num_rows, num_emitted, host_s = len(judged), len(judged), 0.0
        depths, calls = dict[int | None, int](), [0] * self._max_gamma
        for slot, verdict in judged:
            row, draft = self._rows[slot], drafts[slot]
            host = self._times.host(row)
            depth = 0 if draft is None else _depth(draft)
            has_called = draft is not None and draft.num_computed is not None
            called = _num_calls(draft, depth) if draft is not None and has_called else 0
            for position in range(called):
                calls[position] += 1
            depths[slot] = depth
            num_emitted += verdict.num_accepted
            host_s += host.row_s + depth * host.token_s
            # A draft model that only caught up says nothing of what it would propose.
            if depth or not has_called:
                gamma = step.gammas[slot] or 0
                asked = gamma + row.speculation.num_behind if gamma else 0
                counts = max(asked, depth), depth, called, verdict.num_accepted
                name = row.spec.internal_id
                self._rounds.append(Round(name, _group(row), *counts, verdict.overlaps))
        del self._rounds[:-MOST_ROUNDS]
        widest = max(depths.values())
        measurement.num_plain = 0 if widest else measurement.num_plain + 1
        is_idle = measurement.num_idle > 0 and not depths.get(measurement.tried_row)
        if measurement.tried_row is not None and is_idle:
            # Nothing was drafted for it, so nothing was tried.
            measurement.num_left += 1
            measurement.num_idle -= 1
        decision.owed_s = max(0.0, decision.owed_s - COST_SHARE * seconds)
        prices, ratios = self._times.of_rows(live, num_rows), self._times.ratios
        is_settled = widest or measurement.num_plain > guard.SETTLING_STEPS
        if num_rows == len(live) and seconds > 0.0 and not step.catch_up_s and is_settled:
            table_s = prices.step_s(sum(depths.values()), widest, calls[:widest], host_s)
            ratios.add(num_rows, widest, seconds / table_s)
        plain_s = prices.verify_s[0] * ratios.of(num_rows, 0)
        self._charge((num_emitted, seconds, num_rows, plain_s), is_on=widest > 0)

    def _charge(self, served: tuple[int, float, int, float], *, is_on: bool) -> None:
        """Charge the budget, and report a step: its tokens, seconds and rows, and the seconds of a plain one."""
        num_emitted, seconds, num_rows, plain_s = served
        budget, decision = self._budgets.of(num_rows, plain_s), self._decision
        if is_on:
            caught_s = self._step.catch_up_s
            lost_s = seconds - caught_s - num_emitted / num_rows * plain_s
            self._budgets.drafted(budget, seconds, lost_s, caught_s, plain_s)
            decision.is_due |= decision.longest > 0 and not budget.is_open
        else:
            # Fed to a draft model that has drafted nothing yet.
            caught_s = min(self._step.catch_up_s, max(0.0, seconds - plain_s))
            goes_on = decision.longest > 0 or self._measurement.tried_row is not None
            self._budgets.plain(budget, seconds, plain_s, caught_s, goes_on=goes_on)
        self._stats.step(served, is_on=is_on, is_probe=self._measurement.is_probe)

    def _give_up(self, error: Exception) -> None:
        """Say so, keep gammas fixed for a while, and begin anew after that."""
        logger.error("choosing gamma failed; it is fixed for %g s", RETRY_S, exc_info=error)
        self._fixed_until_s = self._clock() + RETRY_S
        self._rows, self._decision.is_due, self._step.is_chosen = (), True, False
        self._measurement.stop()


def _num_calls(draft: Draft, depth: int) -> int:
    return depth if draft.num_calls is None else min(draft.num_calls, depth)


def _depth(draft: Draft) -> int:
    if draft.parents is None:
        return len(draft.tokens)
    return int(tree_layout(draft.parents).depths.max())


def _group(row: Request) -> Group:
    """Return the group of requests whose drafts fare like this one's."""
    return row.speculation.drafter, row.spec.params.is_greedy
