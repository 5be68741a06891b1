"""Times of steps on one machine, in seconds: a value that pure code takes as an argument.

``runtime.calibration`` measures it. Times of a model are a grid over rows and tokens, made monotone (more rows, tokens
or capacity never cost less), interpolated inside and continued with the last slope outside. What the host does beside
the engines, sampling included, is linear in rows and draft tokens, by the kind of distribution that is sampled.
``StepPrices`` adds them up to the price of a step, for engines that pack rows and for those that pad them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

MOST_DISAGREEMENT = 0.1  # share by which two measurements of a settled table's calls may differ
MOST_KEPT = 256  # prices that are kept, by rows and capacity: 64 slots in four sizes of the cache


class RowKind(StrEnum):
    """Ways to sample, by what they cost the sampler.

    GREEDY: an argmax per token. SAMPLED: probability rows of draft and target. STABLE: a race under noise per token
    of the vocabulary.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"
    STABLE = "stable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Seconds of one extend of one model.

    Attributes:
        batches: ascending rows that were measured.
        tokens: ascending tokens per row that were measured.
        seconds: [len(batches)][len(tokens)] at ``capacity``; falls along neither axis.
        capacity: cache positions per row at which the grid was measured.
        position_s: seconds per row and cache position beyond ``capacity``.
    """

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    capacity: int
    position_s: float

    def __post_init__(self) -> None:
        """Check the shape; ValueError names the field and the rule."""
        for name, axis in (("batches", self.batches), ("tokens", self.tokens)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 1:
                raise ValueError(f"{name}: must ascend from at least 1")
        grid = np.asarray(self.seconds, dtype=np.float64)
        if grid.shape != (len(self.batches), len(self.tokens)):
            raise ValueError("seconds: must have one row per batch and one column per tokens")
        if not (np.isfinite(grid).all() and (grid > 0.0).all()):
            raise ValueError("seconds: must be finite and positive")
        if (np.diff(grid, axis=0) < 0.0).any() or (np.diff(grid, axis=1) < 0.0).any():
            raise ValueError("seconds: must not fall along either axis")
        if not 0.0 <= self.position_s < np.inf:
            raise ValueError("position_s: must be finite and at least 0")

    def extend_s(self, batch: int, tokens: int, capacity: int) -> float:
        """Return the seconds of one extend of ``batch`` rows by ``tokens`` each."""
        columns = [_interpolate(self.tokens, row, tokens) for row in self.seconds]
        grown = max(0, capacity - self.capacity) * self.position_s * batch
        return _interpolate(self.batches, columns, batch) + grown


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Seconds the host spends on a row of one kind, whatever is drafted, and on each draft token, judged too."""

    row_s: float
    token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds outside the engines, sampling included: of a step, of each draft call, and of rows by kind."""

    step_s: float
    call_s: float
    rows: Mapping[RowKind, RowCosts]

    def __post_init__(self) -> None:
        """Check that every kind is there and nothing is negative; ValueError names the field."""
        if set(self.rows) != set(RowKind):
            raise ValueError("rows: must have every kind")
        times = [self.step_s, self.call_s]
        times += [t for row in self.rows.values() for t in (row.row_s, row.token_s)]
        if not all(0.0 <= one < np.inf for one in times):
            raise ValueError("host: must be finite and at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Everything a choice of gamma needs to know of a machine.

    Attributes:
        draft: the draft model, and ``catch_up`` the same on one row and long spans; None without one.
        capacities: ascending cache sizes that the engines take, positions per row.
        disagreement: share by which two measurements of the same calls differed, a slower machine aside.
        trees: the target over trees, by tokens of the widest row; None where it takes none.
        read: the target's reads, by tokens of the longest source; None without an encoder.
        draft_read: the draft model's; None likewise.
    """

    target: ModelCosts
    draft: ModelCosts | None
    catch_up: ModelCosts | None
    host: HostCosts
    capacities: tuple[int, ...]
    disagreement: float = 0.0
    trees: ModelCosts | None = None
    read: ModelCosts | None = None
    draft_read: ModelCosts | None = None

    def __post_init__(self) -> None:
        """Check what no part of it has checked; ValueError names the field and the rule."""
        sizes = self.capacities
        if not sizes or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] < 2**31:
            raise ValueError("capacities: must ascend from at least 1")
        if not 0.0 <= self.disagreement < np.inf:
            raise ValueError("disagreement: must be finite and at least 0")

    @property
    def is_settled(self) -> bool:
        """True where the measurements agreed well enough to be kept."""
        return self.disagreement <= MOST_DISAGREEMENT

    def capacity_for(self, num_tokens: int) -> int:
        """Return the cache size in use once ``num_tokens`` of one row were cached."""
        index = bisect_left(self.capacities, num_tokens)
        return self.capacities[min(index, len(self.capacities) - 1)]


class RowPrices(NamedTuple):
    """Seconds of steps over n live rows; lists, as single numbers are read.

    Attributes:
        verify_s: [n * G + 1] a step without draft calls, by its draft tokens in all.
        call_s: [n + 1] one draft call, by its rows.
        packs_rows: True where a call costs by the total of its tokens; else every row costs what the widest does.
    """

    verify_s: list[float]
    call_s: list[float]
    packs_rows: bool

    def step_s(self, total: float, widest: float, calls: Sequence[float], host_s: float) -> float:
        """Return the seconds of a step; its numbers of tokens and rows may be expectations.

        Args:
            total: draft tokens that are verified, of all rows.
            widest: of them, those of the longest draft.
            calls: rows of each draft call.
            host_s: seconds that the host spends on rows and tokens.
        """
        tokens = total if self.packs_rows else widest * (len(self.call_s) - 1)
        seconds = host_s + _between(self.verify_s, tokens)
        for rows in calls:
            seconds += _between(self.call_s, rows)
        return seconds


class StepPrices:
    """Prices of steps with up to G = ``max_gamma`` draft tokens per row, under a cost table."""

    def __init__(self, table: CostTable, *, max_gamma: int, packs_rows: bool) -> None:
        self._table, self._max_gamma, self._packs_rows = table, max_gamma, packs_rows
        self._known: dict[tuple[int, int], RowPrices] = {}

    def of_rows(self, num_rows: int, num_cached: int) -> RowPrices:
        """Return the prices of steps over so many live rows, the longest of which has ``num_cached`` tokens."""
        table, widths = self._table, range(self._max_gamma + 1)
        capacity = table.capacity_for(num_cached + len(widths))
        known = self._known.get((num_rows, capacity))
        if known is None:
            host, draft = table.host, table.draft
            widths_s = [table.target.extend_s(num_rows, 1 + one, capacity) for one in widths]
            totals = np.arange(num_rows * self._max_gamma + 1) / num_rows
            verify_s = host.step_s + np.interp(totals, widths, widths_s)
            call_s = [0.0] + [
                host.call_s + (draft.extend_s(rows, 1, capacity) if draft else 0.0)
                for rows in range(1, num_rows + 1)
            ]
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            known = RowPrices(verify_s.tolist(), call_s, self._packs_rows)
            self._known[num_rows, capacity] = known
        return known

    def catch_up_s(self, num_missing: int) -> float:
        """Return the seconds to feed the draft model so many tokens of one row; 0 without a draft model."""
        costs = self._table.catch_up
        return 0.0 if costs is None else costs.extend_s(1, num_missing, 0)

    def read_s(self, num_tokens: int) -> float:
        """Return the seconds in which the draft model reads a source; 0 where it reads none."""
        costs = self._table.draft_read
        return 0.0 if costs is None else costs.extend_s(1, num_tokens, 0)


def _between(seconds: list[float], at: float) -> float:
    """Return the price of an expected number of tokens or rows, linear between whole ones and beyond the last."""
    whole = min(int(at), max(0, len(seconds) - 2))
    part = at - whole
    if part <= 0.0:
        return seconds[whole]
    return seconds[whole] + part * (seconds[whole + 1] - seconds[whole])


def _interpolate(axis: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the value at a point: piecewise linear, constant below the axis, with the last slope beyond it."""
    if at <= axis[0]:
        return values[0]
    if len(axis) == 1:
        return values[0] * at / axis[0]
    after = min(bisect_left(axis, at), len(axis) - 1)
    before = after - 1
    slope = (values[after] - values[before]) / (axis[after] - axis[before])
    return values[before] + slope * (at - axis[before])
