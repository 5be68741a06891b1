"""What the controller needs to know of live requests: rows in, values out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.laws import ExactnessMode, Verdict
from engines.trees import tree_layout
from runtime.core.acceptance import Rates, Round
from runtime.core.costs import CostTable, RowKind
from runtime.core.forecast import KINDS, Batch
from runtime.core.params import RequestSpec
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


_GREEDY, _STABLE, _SAMPLED = map(KINDS.index, (RowKind.GREEDY, RowKind.STABLE, RowKind.SAMPLED))


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


class RowFacts(NamedTuple):
    """What stays as it is of rows while they stay.

    Attributes:
        is_fixed: of each, whether its gamma is its own.
        calls_model: whether its drafter calls the draft model.
        kinds: index into ``KINDS``.
        deadline_s: the earliest of all; infinite without one.
        alike: group, gamma and freedom of each, in no order: the same for rows whose drafts fare alike.
    """

    is_fixed: list[bool]
    calls_model: list[bool]
    kinds: list[int]
    deadline_s: float
    alike: Hashable


def facts_of(
    rows: Sequence[Request],
    *,
    uses_model: Callable[[str], bool],
    group: Callable[[Request], int],
) -> RowFacts:
    """What holds of rows until they change.

    Args:
        rows: row i holds slot i.
        uses_model: whether a drafter, by name, calls the draft model.
        group: of requests whose drafts fare alike.
    """
    known: dict[str, bool] = {}
    is_fixed, calls_model, kinds, alike = [], [], [], []
    deadline_s = math.inf
    for row in rows:
        one, spec = row.speculation, row.spec
        name = one.drafter
        if name not in known:
            known[name] = uses_model(name)
        calls_model.append(known[name])
        is_fixed.append(not one.is_adaptive)
        kinds.append(_kind(spec))
        alike.append((group(row), one.gamma, one.is_adaptive))
        if spec.deadline_s is not None:
            deadline_s = min(spec.deadline_s, deadline_s)
    return RowFacts(is_fixed, calls_model, kinds, deadline_s, tuple(sorted(alike)))


def batch_of(
    rows: Sequence[Request],
    caps: Sequence[int | None],
    known: RowFacts,
    *,
    expected: tuple[Rates, float],
    num_cached: int,
    now_s: Callable[[], float],
    is_refilled: bool,
) -> Batch:
    """Live rows as the controller sees them; those whose prompt is being read as if they decoded.

    Args:
        rows: at least one; row i holds slot i.
        caps: of each, the most draft tokens it may take; None for rows that do not decode yet.
        known: what holds of them while they stay.
        expected: [n, G] survival of drafts and the doubt of it, from the acceptance book.
        num_cached: tokens of the longest row so far.
        now_s: the clock that deadlines are on.
        is_refilled: whether other requests wait for their slots.
    """
    takes, missing, left = [], [], []
    for row, cap, calls_model in zip(rows, caps, known.calls_model, strict=True):
        num_left = row.num_remaining
        left.append(num_left)
        missing.append(row.num_known - row.draft_computed if calls_model else 0)
        takes.append(max(0, min(row.gamma, num_left - 1)) if cap is None else cap)
    facts = np.array(
        (takes, known.is_fixed, known.calls_model, known.kinds, missing, left), dtype=np.int64
    )
    left_s = known.deadline_s - now_s()
    survival, doubt = expected
    return Batch(facts, survival, num_cached, left_s, doubt, is_refilled)


def situation_of(live: Sequence[Request], known: RowFacts, *, is_refilled: bool) -> Hashable:
    """What decides whether drafts pay, as far as that can be told without asking again.

    Args:
        live: request i holds slot i.
        known: what holds of them while they stay.
        is_refilled: whether other requests wait for their slots.
    """
    longest = max([row.num_remaining for row in live])
    return is_refilled, min(longest, NEAR_END), known.alike


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


def _kind(spec: RequestSpec) -> int:
    if spec.law.is_greedy:
        return _GREEDY
    return _STABLE if spec.speculation.mode is ExactnessMode.SEED_STABLE else _SAMPLED


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
