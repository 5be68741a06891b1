"""What the controller needs to know of live requests: rows in, values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engines.laws import ExactnessMode
from engines.trees import tree_layout
from runtime.core.acceptance import Rates
from runtime.core.costs import CostTable, RowKind
from runtime.core.forecast import KINDS, Batch
from runtime.core.request import Request


def batch_of(
    rows: Sequence[Request],
    caps: Sequence[int],
    *,
    uses_model: Callable[[str], bool],
    survival: Rates,
    num_live: int,
    num_cached: int,
    now_s: Callable[[], float],
) -> Batch:
    """Decoding rows as the controller sees them.

    Args:
        rows: at least one.
        caps: of each, the most draft tokens it may take.
        uses_model: whether a drafter, by name, calls the draft model.
        survival: [n, G] from the acceptance book.
        num_live: rows of the engine call, decoding or not.
        num_cached: tokens of the longest row so far.
        now_s: the clock that deadlines are on.
    """
    known: dict[str, bool] = {}
    calls_model = np.zeros(len(rows), dtype=np.bool_)
    for index, row in enumerate(rows):
        name = row.speculation.drafter
        if name not in known:
            known[name] = uses_model(name)
        calls_model[index] = known[name]
    missing = np.array([row.num_known - row.draft_computed for row in rows])
    deadlines = [row.spec.deadline_s for row in rows if row.spec.deadline_s is not None]
    return Batch(
        caps=np.array(caps, dtype=np.int64),
        is_fixed=np.array([not row.speculation.is_adaptive for row in rows]),
        uses_model=calls_model,
        kinds=np.array([_kind(row) for row in rows]),
        num_missing=np.where(calls_model, missing, 0),
        num_remaining=np.array([row.num_remaining for row in rows]),
        survival=survival,
        num_live=num_live,
        num_cached=num_cached,
        time_left_s=min(deadlines) - now_s() if deadlines else None,
    )


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


def depth_of(parents: tuple[int, ...]) -> int:
    """Tokens of a tree's longest path."""
    return int(tree_layout(parents).depths.max())


def _kind(request: Request) -> int:
    if request.spec.law.is_greedy:
        return KINDS.index(RowKind.GREEDY)
    is_stable = request.spec.speculation.mode is ExactnessMode.SEED_STABLE
    return KINDS.index(RowKind.STABLE if is_stable else RowKind.SAMPLED)


def catches_up(
    rows: Sequence[Request], are_fed: Sequence[bool], gammas: Sequence[int], most: int
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
