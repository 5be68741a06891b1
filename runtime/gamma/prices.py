"""The price of one step, from the cost table: for engines that pack rows, and for those that pad them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from outrider.runtime.gamma.costs import CostTable, RowKind

MOST_KEPT = (
    256  # pairs of rows and capacity whose prices are kept: 64 slots in four sizes of the cache
)


class RowPrices(NamedTuple):
    """Seconds by number of tokens and rows, for a step over n live rows; lists, as single numbers are read.

    Attributes:
        verify_s: [n * G + 1] a step without draft calls, by its draft tokens in all.
        call_s: [n + 1] one draft call, by its rows.
    """

    verify_s: list[float]
    call_s: list[float]


class StepPrices:
    """Prices of steps under a cost table.

    Args:
        table: measured costs.
        max_gamma: G.
        packs_rows: whether a call costs by the total of its tokens; else every row costs what the widest does.
    """

    def __init__(self, table: CostTable, *, max_gamma: int, packs_rows: bool) -> None:
        self._table = table
        self._max_gamma = max_gamma
        self._packs_rows = packs_rows
        self._known: dict[tuple[int, int], RowPrices] = {}
        self.row_s = {kind: table.host.rows[kind].row_s for kind in RowKind}
        self.token_s = {kind: table.host.rows[kind].token_s for kind in RowKind}

    def step_s(
        self,
        prices: RowPrices,
        total: float,
        widest: float,
        calls: Sequence[float],
        host_s: float,
    ) -> float:
        """Return the seconds of a step.

        Args:
            prices: of its rows, from ``of_rows``.
            total: draft tokens that are verified, of all rows; may be an expectation.
            widest: of the longest draft.
            calls: rows of each draft call.
            host_s: seconds that the host spends on rows and tokens.
        """
        tokens = total if self._packs_rows else widest * (len(prices.call_s) - 1)
        seconds = host_s + _between(prices.verify_s, tokens)
        for rows in calls:
            seconds += _between(prices.call_s, rows)
        return seconds

    def of_rows(self, num_rows: int, num_cached: int) -> RowPrices:
        """Return the prices of steps over so many rows.

        Args:
            num_rows: live rows, decoding or not.
            num_cached: tokens of the longest of them.
        """
        table, most = self._table, self._max_gamma
        capacity = table.capacity_for(num_cached + most + 1)
        known = self._known.get((num_rows, capacity))
        if known is None:
            host, draft = table.host, table.draft
            widths_s = [
                table.target.extend_s(num_rows, 1 + width, capacity) for width in range(most + 1)
            ]
            totals = np.arange(num_rows * most + 1) / num_rows
            verify_s = host.step_s + np.interp(totals, np.arange(most + 1), widths_s)
            calls_s = [
                host.call_s + (draft.extend_s(rows, 1, capacity) if draft else 0.0)
                for rows in range(1, num_rows + 1)
            ]
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            known = self._known[num_rows, capacity] = RowPrices(verify_s.tolist(), [0.0, *calls_s])
        return known

    def catch_up_s(self, num_missing: int) -> float:
        """Return the seconds to feed the draft model so many tokens of one row; 0 without a draft model."""
        costs = self._table.catch_up
        return 0.0 if costs is None else costs.extend_s(1, num_missing, 0)


def _between(seconds: list[float], at: float) -> float:
    """Return what an expected number of tokens or rows costs, linear between whole ones."""
    whole = int(at)
    part = at - whole
    if part <= 0.0:
        return seconds[whole]
    return seconds[whole] + part * (seconds[whole + 1] - seconds[whole])
