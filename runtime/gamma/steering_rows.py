"""What the controller needs to know of live requests: rows in, values out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Request
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.gamma.forecast import KINDS, Batch

# Part of the rows whose coming and going leaves a decision as it is.
FEW = 4
NEAR_END = 4
"""Tokens left to the longest row, from which on their number makes no difference to a situation."""


_GREEDY, _STABLE, _SAMPLED = map(KINDS.index, (RowKind.GREEDY, RowKind.STABLE, RowKind.SAMPLED))


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
    expected: tuple[Rates, Rates, float],
    num_cached: int,
    now_s: float,
    is_refilled: bool,
) -> Batch:
    """Live rows as the controller sees them; those whose prompt is being read as if they decoded.

    Args:
        rows: at least one; row i holds slot i.
        caps: of each, the most draft tokens it may take; None for rows that do not decode yet.
        known: what holds of them while they stay.
        expected: [n, G] survival of drafts, [2, n, G] shares and the doubt, from the acceptance book.
        num_cached: tokens of the longest row before.
        now_s: on the clock that deadlines are on.
        is_refilled: whether other requests wait for their slots.
    """
    takes, missing, left = [], [], []
    for row, cap, calls_model in zip(rows, caps, known.calls_model, strict=True):
        num_left, num_known = row.num_remaining, row.num_known
        num_cached = max(num_cached, num_known)
        left.append(num_left)
        missing.append(num_known - row.draft_computed if calls_model else 0)
        takes.append(max(0, min(row.gamma, num_left - 1)) if cap is None else cap)
    facts = np.array(
        (takes, known.is_fixed, known.calls_model, known.kinds, missing, left), dtype=np.int64
    )
    left_s = known.deadline_s - now_s
    survival, shares, doubt = expected
    return Batch(facts, survival, shares, num_cached, left_s, doubt, is_refilled)


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


def held_back(caps: Sequence[int | None], gammas: Sequence[int | None]) -> list[int]:
    """Rows that could draft and do not."""
    return [slot for slot, cap in enumerate(caps) if cap and not gammas[slot]]


def rows_fed(
    live: Sequence[Request], gammas: Sequence[int | None], facts: RowFacts
) -> list[Request]:
    """Rows that draft with the draft model.

    Args:
        live: request i holds slot i.
        gammas: of each; None for rows that do not decode.
        facts: of them.
    """
    every = zip(live, gammas, facts.calls_model, strict=True)
    return [row for row, gamma, is_fed in every if gamma and is_fed]


# Asked in every step, at a price of which a generator would be the half.
def are_behind(fed: Sequence[Request], most: int) -> bool:
    """Whether the draft model is first fed what a row missed, beyond ``most`` tokens that are fed with the others'."""
    for row in fed:  # noqa: SIM110
        if row.num_known - row.draft_computed > most:
            return True
    return False


def has_ended(live: Sequence[Request]) -> bool:
    """Whether some row has."""
    for row in live:  # noqa: SIM110
        if row.state is State.FINISHED or row.state is State.FAILED:
            return True
    return False


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
        key = (request.speculation.drafter, request.spec.params.is_greedy)
        if len(self._known) >= self._most - 1:
            return self._known.get(key, self._most - 1)
        return self._known.setdefault(key, len(self._known))


def _kind(spec: RequestSpec) -> int:
    if spec.params.is_greedy:
        return _GREEDY
    return _STABLE if spec.speculation.mode is ExactnessMode.SEED_STABLE else _SAMPLED


def plain_step_s(table: CostTable, rows: int) -> float:
    """Tabled seconds of a step without drafts."""
    return table.target.extend_s(max(rows, 1), 1, table.target.capacity) + table.host.step_s
