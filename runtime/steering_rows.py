"""What the controller needs to know of live requests: rows in, values out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.laws import ExactnessMode, Verdict
from engines.trees import tree_layout
from runtime.core.acceptance import Rates, Round
from runtime.core.costs import CostTable, RowKind
from runtime.core.forecast import KINDS, Batch
from runtime.core.request import Request, Speculation
from runtime.drafters.base import Draft

# Steps at rest that are told at once: so many whatever may be due, and at most.
LEAST_REST, MOST_REST = 16, 256
# Steps with drafts that are answered alike at most.
MOST_COURSE = 16
# Part of the rows whose coming and going leaves a decision as it is.
FEW = 4
NEAR_END = 4
"""Tokens left to the longest row, from which on their number makes no difference to a situation."""


@dataclass(slots=True)
class Rest:
    """Steps alike, without drafts: the controller is told of them at once.

    Even a cheap look at the rows has to be fetched from memory that the engines have pushed out of the processor's
    caches: at batch 1 it is a twentieth of a small model's step.

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


@dataclass(slots=True)
class Course:
    """Steps alike, with drafts: rows are not looked at, and the controller is not asked, until it ends.

    Attributes:
        live: request i holds slot i.
        drafted: how each is drafted for; a drafter that fails or pauses leaves its requests another.
        caps: as ``Steering.choose`` was given.
        gammas: that it answered.
        num_left: steps that it may still answer so.
        left_s: seconds until it is time to decide.
        num_taken: steps so far.
    """

    live: Sequence[Request]
    drafted: Sequence[Speculation]
    caps: tuple[int | None, ...]
    gammas: tuple[int | None, ...]
    num_left: int
    left_s: float
    num_taken: int = 0

    def holds(self, live: Sequence[Request], caps: tuple[int | None, ...]) -> bool:
        """Whether the next step is one of them; then it is taken."""
        if not self.num_left or self.left_s <= 0.0 or caps != self.caps or live != self.live:
            return False
        if any(row.speculation is not one for row, one in zip(live, self.drafted, strict=True)):
            return False
        self.num_left -= 1
        self.num_taken += 1
        return True


def course_of(
    live: Sequence[Request],
    caps: tuple[int | None, ...],
    gammas: tuple[int | None, ...],
    num_alike: int,
    left_s: float,
) -> Course | None:
    """The course that begins after a step; None where the next may be another, or rows' prompts are being read."""
    if num_alike <= 0 or left_s <= 0.0 or None in caps:
        return None
    drafted = [row.speculation for row in live]
    return Course(tuple(live), drafted, caps, gammas, min(num_alike, MOST_COURSE), left_s)


def batch_of(
    rows: Sequence[Request],
    caps: Sequence[int | None],
    *,
    uses_model: Callable[[str], bool],
    survival: Rates,
    doubt: float,
    num_cached: int,
    now_s: Callable[[], float],
    is_refilled: bool,
) -> Batch:
    """Live rows as the controller sees them; those whose prompt is being read as if they decoded.

    Args:
        rows: at least one; row i holds slot i.
        caps: of each, the most draft tokens it may take; None for rows that do not decode yet.
        uses_model: whether a drafter, by name, calls the draft model.
        survival: [n, G] from the acceptance book.
        doubt: of the acceptance that the traffic shows, from there, too.
        num_cached: tokens of the longest row so far.
        now_s: the clock that deadlines are on.
        is_refilled: whether other requests wait for their slots.
    """
    known: dict[str, bool] = {}
    calls_model: list[bool] = []
    facts: list[tuple[int, int, int, int]] = []
    deadlines: list[float] = []
    for row, cap in zip(rows, caps, strict=True):
        name = row.speculation.drafter
        if name not in known:
            known[name] = uses_model(name)
        calls_model.append(known[name])
        left = row.num_remaining
        missing = row.num_known - row.draft_computed if known[name] else 0
        will_take = max(0, min(row.gamma, left - 1)) if cap is None else cap
        facts.append((will_take, missing, left, _kind(row)))
        if row.spec.deadline_s is not None:
            deadlines.append(row.spec.deadline_s)
    columns = np.array(facts, dtype=np.int64).T
    return Batch(
        caps=columns[0],
        is_fixed=np.array([not row.speculation.is_adaptive for row in rows]),
        uses_model=np.array(calls_model),
        kinds=columns[3],
        num_missing=columns[1],
        num_remaining=columns[2],
        survival=survival,
        doubt=doubt,
        num_live=len(rows),
        num_cached=num_cached,
        time_left_s=min(deadlines) - now_s() if deadlines else None,
        is_refilled=is_refilled,
    )


def situation_of(
    live: Sequence[Request], group: Callable[[Request], int], *, is_refilled: bool
) -> Hashable:
    """What decides whether drafts pay, as far as that can be told without asking again.

    Args:
        live: request i holds slot i.
        group: of requests whose drafts fare alike.
        is_refilled: whether other requests wait for their slots.
    """
    rows = [(group(row), row.gamma, row.speculation.is_adaptive) for row in live]
    longest = max(row.num_remaining for row in live)
    return is_refilled, min(longest, NEAR_END), tuple(sorted(rows))


def bounded(caps: Sequence[int | None], gammas: Sequence[int]) -> tuple[int | None, ...]:
    """Gammas within caps; None for rows that do not decode."""
    pairs = zip(caps, gammas, strict=True)
    return tuple([cap if cap is None or cap < gamma else gamma for cap, gamma in pairs])


def fixed_gammas(live: Sequence[Request], caps: Sequence[int | None]) -> tuple[int | None, ...]:
    """As if nothing were ever chosen."""
    return tuple(
        cap
        if cap is None or (fixed := request.speculation.fixed_gamma) is None
        else min(cap, fixed)
        for request, cap in zip(live, caps, strict=True)
    )


def known_gamma(request: Request, known: Mapping[int, int], usual: int) -> int:
    """As decided; a newcomer that has no gamma of its own takes the usual one until then."""
    return known.get(id(request), usual if request.speculation.is_adaptive else request.gamma)


def judged_rounds(
    drafts: Sequence[Draft | None], judged: Sequence[tuple[int, Verdict]]
) -> list[Round]:
    """What verification revealed of each row that drafted; a tree counts as deep as it is."""
    rounds = []
    for slot, verdict in judged:
        draft = drafts[slot]
        if draft is not None and draft.tokens:
            parents = draft.parents
            depth = len(draft.tokens) if parents is None else int(tree_layout(parents).depths.max())
            rounds.append(Round(slot, depth, verdict.num_accepted, verdict.overlaps))
    return rounds


def are_others(live: Sequence[Request], decided: Sequence[Request]) -> bool:
    """Whether more than one row in ``FEW`` came or went since a decision, which then no longer stands."""
    return len(set(map(id, live)) ^ set(map(id, decided))) > len(live) // FEW


class Groups:
    """Requests of one drafter and temperature class share their traffic; those beyond ``most`` one group."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[str, bool], int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request: Request) -> int:
        """Index of the request's group."""
        key = (request.speculation.drafter, request.spec.law.is_greedy)
        if len(self._known) >= self._most - 1:
            return self._known.get(key, self._most - 1)
        return self._known.setdefault(key, len(self._known))


def _kind(request: Request) -> int:
    if request.spec.law.is_greedy:
        return KINDS.index(RowKind.GREEDY)
    is_stable = request.spec.speculation.mode is ExactnessMode.SEED_STABLE
    return KINDS.index(RowKind.STABLE if is_stable else RowKind.SAMPLED)


def catches_up(
    rows: Sequence[Request], are_fed: Sequence[bool], gammas: Sequence[int | None], most: int
) -> bool:
    """Whether the draft model is first fed what a row that drafts missed, beyond ``most`` tokens.

    Args:
        rows: that decode.
        are_fed: of each, whether its drafter calls the draft model.
        gammas: of each.
        most: tokens a row may miss and still be fed with the others.
    """
    return any(
        gamma and is_fed and row.num_known - row.draft_computed > most
        for row, is_fed, gamma in zip(rows, are_fed, gammas, strict=True)
    )


def plain_step_s(table: CostTable, rows: int) -> float:
    """Tabled seconds of a step without drafts."""
    return table.target.extend_s(max(rows, 1), 1, table.target.capacity) + table.host.step_s
