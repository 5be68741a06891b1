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
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, Verdict
from outrider.engines.trees import tree_layout
from outrider.runtime.core.request import Request
from outrider.runtime.core.stats import ControlReport
from outrider.runtime.drafters.base import Draft
from outrider.runtime.gamma import guard
from outrider.runtime.gamma.acceptance import MOST_GROUPS, Acceptance, Round
from outrider.runtime.gamma.choose import Options, Rows, options_of
from outrider.runtime.gamma.costs import CostTable, RowKind, StepPrices
from outrider.runtime.gamma.report import GammaStats

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


class Controller:
    """Gammas for the adaptive requests of a worker.

    Args:
        table: measured costs of the worker's engines.
        max_gamma: G, draft tokens of one row at most.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        uses_model: returns True for the name of a drafter that calls the draft model.
        packs_rows: True where the engines' calls cost by the total of their tokens.
        are_waiting: returns True while requests wait for the slots of those that end.
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
        are_waiting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prices = StepPrices(table, max_gamma=max_gamma, packs_rows=packs_rows)
        self._host = table.host.rows
        self._acceptance = Acceptance(max_gamma)
        self._ratios = guard.Ratios()
        self._budgets = guard.Budgets()
        self._stats = GammaStats(max_gamma)
        self._max_gamma, self._most_missing = max_gamma, max_shared_missing
        # Callers compose names of drafters: no more are kept than are served at once.
        self._uses_model = lru_cache(maxsize=256)(uses_model)
        self._are_waiting, self._clock = are_waiting, clock
        # The rows last seen, and what was decided for them.
        self._rows: tuple[Request, ...] = ()
        self._gammas: dict[str, int] = {}
        self._longest = 0
        self._is_due, self._load = True, (0, set[Hashable]())
        self._since, self._owed_s, self._decide_by_s = 0, 0.0, np.inf
        self._rounds: list[Round] = []
        # The step under way is a plain one of a probe, tries drafts of one row, or does what was decided.
        self._is_probe, self._num_left = False, 0
        self._tried_row: int | None = None
        self._asked: Gammas = ()
        self._catch_up_s = self._began_s = 0.0
        self._is_choosing = False
        self._until_probe, self._num_plain = guard.FIRST_PROBE, 0
        self._num_tries, self._try_at_s = dict[Hashable, int](), 0.0
        self._fixed_until_s = -np.inf
        self._elapsed = 0.0

    def choose(self, live: Sequence[Request], caps: Gammas) -> Gammas:
        """Return the gammas of the next step.

        Args:
            live: request i holds slot i.
            caps: the most draft tokens that each slot may take.
        """
        self._began_s = self._clock()
        self._is_choosing = False
        if self._began_s >= self._fixed_until_s:
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
        seconds = self._clock() - self._began_s
        if judged:
            self._elapsed += seconds / self._plain_s(len(judged))
        if judged and self._is_choosing:
            try:
                self._observe(live, drafts, judged, seconds)
            except Exception as error:  # what was not learnt harms nobody
                self._give_up(error)

    def elapsed(self) -> float:
        """Return the time of steps so far, in plain steps of as many rows; callable from any thread."""
        return self._elapsed

    def report(self) -> ControlReport:
        """Return what the choices brought; callable from any thread."""
        return self._stats.report()

    def _choose(self, live: Sequence[Request], caps: Gammas) -> Gammas:
        self._align(live)
        if not any(row.speculation.is_adaptive for row in self._rows):
            return caps
        self._is_choosing = True
        is_paid = self._since >= DECIDE_EVERY and self._owed_s <= 0.0
        # While prompts are read, more rows are about to decode, and to be decided on.
        is_due = self._is_due and (None not in caps or not self._gammas)
        if is_due or is_paid or self._began_s > self._decide_by_s:
            self._decide(caps)
        self._since += 1
        self._begin_measuring(caps)
        chosen, self._catch_up_s = list(caps), 0.0
        for slot, (row, cap) in enumerate(zip(self._rows, caps, strict=True)):
            if not cap:
                continue
            if row.speculation.is_adaptive:
                gamma = chosen[slot] = min(cap, self._gamma_of(slot))
                row.stats.num_off += gamma == 0 and not self._is_probe
            if chosen[slot]:
                self._catch_up_s += self._missed_s(row)
        self._asked = tuple(chosen)
        self._began_s = self._clock()
        return self._asked

    def _gamma_of(self, slot: int) -> int:
        if self._is_probe:
            return 0
        if self._tried_row is not None:
            return int(slot == self._tried_row)
        # Who came since the decision takes what is usual until the next.
        return self._gammas.get(self._rows[slot].spec.internal_id, self._longest)

    def _align(self, live: Sequence[Request]) -> None:
        """Take note of the live rows; those like the ones decided on do what is usual until the next decision."""
        if self._rows == tuple(live):
            return
        self._rows = tuple(live)
        load = guard.load_of(len(live)), {_group(row) for row in live}
        # Fewer rows than were decided on are no reason for haste.
        self._is_due |= load[0] > self._load[0] or load[1] != self._load[1]
        self._load, self._since = load, DECIDE_EVERY
        if self._tried_row is not None:
            self._num_left = 0

    def _decide(self, caps: Gammas) -> None:
        """Choose gammas for the live rows; those whose prompt is being read as if they decoded."""
        began_s = self._clock()
        rows, num_rows = self._rows, len(self._rows)
        self._acceptance.record(self._rounds)
        self._rounds.clear()
        self._acceptance.keep_only({row.spec.internal_id for row in rows})
        most, catch_up = [], []
        for row, cap in zip(rows, caps, strict=True):
            left = row.sequence.num_remaining
            most.append(max(0, min(row.speculation.gamma, left - 1)) if cap is None else cap)
            pays = row.speculation.is_adaptive
            catch_up.append(self._missed_s(row) / min(max(left, 1), HORIZON) if pays else 0.0)
        hosts = [self._host[_kind(row)] for row in rows]
        options = options_of(
            Rows(
                np.array(most, dtype=np.int64),
                np.array([not row.speculation.is_adaptive for row in rows]),
                np.array([self._uses_model(row.speculation.drafter) for row in rows]),
                sum([host.row_s for host in hosts]),
                np.array([host.token_s for host in hosts]),
                np.array(catch_up),
            ),
            self._acceptance.expect([(row.spec.internal_id, _group(row)) for row in rows]),
            self._prices.of_rows(num_rows, max([row.sequence.num_known for row in rows])),
            [self._ratios.of(num_rows, longest) for longest in range(self._max_gamma + 1)],
        )
        self._stats.consider(np.array([options.tokens, options.seconds]))
        is_open = self._budgets.of(num_rows, self._plain_s(num_rows)).is_open
        self._longest = self._best(options, began_s) if is_open else 0
        gammas = options.gammas[self._longest].tolist()
        self._gammas = dict(zip([row.spec.internal_id for row in rows], gammas, strict=True))
        self._since, self._is_due, self._try_at_s = 0, False, 0.0
        took_s = self._clock() - began_s
        self._owed_s += took_s
        self._stats.decided(took_s)

    def _best(self, options: Options, now_s: float) -> int:
        """Return the longest draft of the best rate; the one in use keeps its place within a margin."""
        rates = options.tokens / options.seconds
        deadlines = [row.spec.deadline_s for row in self._rows]
        left_s = min([one - now_s for one in deadlines if one is not None], default=np.inf)
        rates[1:][options.seconds[1:] > left_s] = 0.0
        # While the longest of these steps still fits, no deadline is near.
        self._decide_by_s = now_s + left_s - 2.0 * float(options.seconds.max())
        if len(self._rows) > 1 and not self._are_waiting():
            rates[0] *= 1.0 + LEAD
        elif self._longest == 0:
            rates[0] *= 1.0 + MARGIN
        best = int(rates.argmax())
        is_better = rates[best] > rates[self._longest] * (1.0 + MARGIN)
        return best if is_better or best == 0 else self._longest

    def _begin_measuring(self, caps: Gammas) -> None:
        """Go on with the probe or the try under way, or begin one where it is due."""
        if self._num_left:
            self._num_left -= 1
            return
        # The results of a try are decided on in the next step.
        self._is_due |= self._tried_row is not None
        self._is_probe, self._tried_row = False, None
        if self._longest:
            self._until_probe -= 1
            if self._until_probe <= 0:
                self._is_probe, self._num_left = True, guard.PROBE_STEPS - 1
                self._until_probe = guard.PROBE_EVERY
        elif None not in caps and not self._is_due:
            self._begin_try(caps)

    def _begin_try(self, caps: Gammas) -> None:
        """Draft single tokens of one row for some steps, where enough was saved for what that may lose."""
        num_rows = len(self._rows)
        saved_s = self._budgets.of(num_rows, self._plain_s(num_rows)).saved_s
        if saved_s < self._try_at_s:
            return
        rows = [
            (self._num_tries.get(_group(row), 0), self._missed_s(row), slot)
            for slot, (row, cap) in enumerate(zip(self._rows, caps, strict=True))
            if cap
            and row.speculation.is_adaptive
            and row.sequence.num_remaining > guard.TRY_STEPS + 2
        ]
        prices = self._prices.of_rows(num_rows, 0)
        plain_s, one_s = (
            prices.step_s(one, one, [one], 0.0) * self._ratios.of(num_rows, one) for one in (0, 1)
        )
        num_tries, missed_s, slot = min(rows, default=(0, plain_s, 0))
        self._try_at_s = guard.TRY_STEPS * max(0.0, one_s - plain_s) + missed_s
        if rows and saved_s >= max(self._try_at_s, plain_s * guard.LOST_SHARE):
            group = _group(self._rows[slot])
            self._acceptance.soften(group)
            self._num_tries.pop(group, None)
            self._num_tries[group] = num_tries + 1
            if len(self._num_tries) > MOST_GROUPS:
                del self._num_tries[next(iter(self._num_tries))]
            self._tried_row, self._num_left = slot, guard.TRY_STEPS - 1

    def _observe(
        self,
        live: Sequence[Request],
        drafts: Sequence[Draft | None],
        judged: Sequence[tuple[int, Verdict]],
        seconds: float,
    ) -> None:
        num_rows, num_emitted, host_s = len(judged), len(judged), 0.0
        depths, calls = [], [0] * self._max_gamma
        for slot, verdict in judged:
            row, draft, host = self._rows[slot], drafts[slot], self._host[_kind(self._rows[slot])]
            depth = 0 if draft is None else _depth(draft)
            has_called = draft is not None and draft.num_computed is not None
            called = depth if has_called else 0
            for position in range(called):
                calls[position] += 1
            depths.append(depth)
            num_emitted += verdict.num_accepted
            host_s += host.row_s + depth * host.token_s
            # A draft model that only caught up says nothing of what it would propose.
            if depth or not has_called:
                counts = max(self._asked[slot] or 0, depth), depth, called, verdict.num_accepted
                name = row.spec.internal_id
                self._rounds.append(Round(name, _group(row), *counts, verdict.overlaps))
        del self._rounds[:-MOST_ROUNDS]
        longest, widest = max([gamma or 0 for gamma in self._asked]), max(depths)
        self._num_plain = 0 if longest else self._num_plain + 1
        self._owed_s = max(0.0, self._owed_s - COST_SHARE * seconds)
        prices = self._prices.of_rows(num_rows, max([row.sequence.num_known for row in live]))
        is_settled = longest or self._num_plain > guard.SETTLING_STEPS
        if num_rows == len(live) and seconds > 0.0 and not self._catch_up_s and is_settled:
            table_s = prices.step_s(sum(depths), widest, calls[:widest], host_s)
            self._ratios.add(num_rows, longest, seconds / table_s)
        plain_s = prices.verify_s[0] * self._ratios.of(num_rows, 0)
        self._charge((num_emitted, seconds, num_rows, plain_s), is_on=widest > 0)

    def _charge(self, served: tuple[int, float, int, float], *, is_on: bool) -> None:
        """Charge the budget, and report a step: its tokens, seconds and rows, and the seconds of a plain one."""
        num_emitted, seconds, num_rows, plain_s = served
        budget = self._budgets.of(num_rows, plain_s)
        if is_on:
            lost_s = seconds - self._catch_up_s - num_emitted / num_rows * plain_s
            self._budgets.drafted(budget, seconds, lost_s, self._catch_up_s, plain_s)
            self._is_due |= self._longest > 0 and not budget.is_open
        else:
            self._budgets.plain(budget, seconds, plain_s, goes_on=self._longest > 0)
        self._stats.step(served, is_on=is_on, is_probe=self._is_probe)

    def _plain_s(self, num_rows: int) -> float:
        """Return the tabled seconds of a plain step, at the smallest size of the cache."""
        return self._prices.of_rows(num_rows, 0).verify_s[0]

    def _missed_s(self, row: Request) -> float:
        """Return the seconds to feed the draft model what a row missed, beyond what is fed along anyway."""
        if not self._uses_model(row.speculation.drafter):
            return 0.0
        computed = row.cache.draft_computed
        read_s = self._prices.read_s(len(row.spec.source_tokens)) if computed < 0 else 0.0
        num_missing = row.sequence.num_known - max(computed, 0)
        if num_missing <= self._most_missing:
            return read_s
        return read_s + self._prices.catch_up_s(num_missing - 1)

    def _give_up(self, error: Exception) -> None:
        """Say so, keep gammas fixed for a while, and begin anew after that."""
        logger.error("choosing gamma failed; it is fixed for %g s", RETRY_S, exc_info=error)
        self._fixed_until_s = self._clock() + RETRY_S
        self._rows, self._is_due, self._is_choosing = (), True, False
        self._is_probe, self._tried_row, self._num_left = False, None, 0


def _depth(draft: Draft) -> int:
    if draft.parents is None:
        return len(draft.tokens)
    return int(tree_layout(draft.parents).depths.max())


def _kind(row: Request) -> RowKind:
    if row.spec.params.is_greedy:
        return RowKind.GREEDY
    is_stable = row.spec.speculation.mode is ExactnessMode.SEED_STABLE
    return RowKind.STABLE if is_stable else RowKind.SAMPLED


def _group(row: Request) -> Hashable:
    """Return the group of requests whose drafts fare like this one's."""
    return row.speculation.drafter, row.spec.params.is_greedy
