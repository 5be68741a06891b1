"""What a decision computes where engines pack rows, as the formulas read; see ``numpy_choice``."""

from __future__ import annotations

import numpy as np
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.gamma.forecast import Batch
from outrider.runtime.gamma.packed_loops import PART

from tests.runtime.gamma.numpy_choice import Rows, catch_up_s


class NumpyPacked:
    """The arrays of ``Forecast`` for every longest draft, each gamma priced on its own."""

    def __init__(
        self, table: CostTable, batch: Batch, scales: Rates, *, shared: int, horizon: int
    ) -> None:
        shares, batch = batch.shares, Rows(batch)
        self.table, self.batch = table, batch
        self.num_rows, self.max_gamma = batch.survival.shape
        self.proposed, self.called = shares
        self.longest = np.arange(self.max_gamma + 1)
        costs = [table.host.rows[kind] for kind in RowKind]
        self.token_s = np.array([one.token_s for one in costs])[batch.kinds]
        self.rows_s = sum(costs[kind].row_s for kind in batch.kinds)
        self.capacity = table.capacity_for(batch.num_cached + self.max_gamma + 1)
        self.once_s = catch_up_s(table, batch, shared, horizon)
        bare = batch.caps * batch.is_fixed
        self.floor = int(bare.max())
        self.plain_tokens, self.plain_table_s = self.tokens_of(bare), self.seconds_of(bare)
        pay = self.plain_tokens / (self.plain_table_s * scales[self.floor])
        for _ in range(2):
            self.gammas = np.array(
                [self.gammas_for(longest, bare, pay) for longest in self.longest]
            )
            self.tokens = np.array([self.tokens_of(one) for one in self.gammas])
            self.table_s = np.array(
                [self.seconds_of(one) + self.catch_up_s(one) for one in self.gammas]
            )
            seconds = self.table_s * scales
            left_s = batch.time_left_s
            if seconds[self.floor] <= left_s:
                seconds[seconds > left_s] = np.inf
            seconds[: self.floor] = np.inf
            seconds[self.gammas.max(axis=1) < self.longest] = np.inf
            self.seconds = seconds
            pay = (self.tokens / seconds).max()
        capped = np.minimum(self.longest[:, None], batch.caps)
        fixed_s = np.array([self.seconds_of(one) for one in capped]) * scales
        self.fixed = np.stack([[self.tokens_of(one) for one in capped], fixed_s])

    def tokens_of(self, gammas: np.ndarray) -> float:
        taken = np.arange(self.max_gamma) < gammas[:, None]
        return self.num_rows + float((self.batch.survival * taken).sum())

    def catch_up_s(self, gammas: np.ndarray) -> float:
        taken = np.arange(self.max_gamma) < gammas[:, None]
        emitted = 1.0 + (self.batch.survival * taken).sum(axis=1)
        return float((self.once_s * emitted)[gammas > 0].sum())

    def seconds_of(self, gammas: np.ndarray) -> float:
        """Expected seconds where so much is asked for, catching up left out."""
        taken = np.arange(self.max_gamma) < gammas[:, None]
        calling = self.called * taken * self.batch.uses_model[:, None]
        return self.seconds_for((self.proposed * taken).sum(axis=1), calling.sum(axis=0))

    def seconds_for(self, lengths: np.ndarray, num_calling: np.ndarray) -> float:
        """Seconds where so much is proposed."""
        batch, host = self.batch, self.table.host
        mean = lengths.sum() / batch.num_live
        below, above = int(np.floor(mean)), int(np.ceil(mean))
        verify_s = [
            self.table.target.extend_s(batch.num_live, 1 + one, self.capacity)
            for one in (below, above)
        ]
        seconds = host.step_s + np.interp(mean - below, [0, 1], verify_s)
        seconds += sum(self.call_s(rows) for rows in num_calling)
        return float(seconds + self.rows_s + lengths @ self.token_s)

    def call_s(self, rows: float) -> float:
        numbers = np.arange(self.num_rows + 1)
        draft, call_s = self.table.draft, self.table.host.call_s
        seconds = [0.0] + [draft.extend_s(int(n), 1, self.capacity) + call_s for n in numbers[1:]]
        return float(np.interp(rows, numbers, seconds))

    @property
    def mean_s(self) -> tuple[Rates, Rates]:
        """[n] what one more token costs on average, and its draft call."""
        batch, target = self.batch, self.table.target
        ends = [
            target.extend_s(batch.num_live, width, self.capacity)
            for width in (1, 1 + self.max_gamma)
        ]
        mean_s = (ends[1] - ends[0]) / (self.num_rows * self.max_gamma) + self.token_s
        return mean_s, batch.uses_model * self.call_s(self.num_rows) / self.num_rows

    def gammas_for(self, longest: int, bare: np.ndarray, pay: float) -> np.ndarray:
        batch = self.batch
        token_s, call_s = (one[:, None] for one in self.mean_s)
        price = pay * (self.proposed * token_s + self.called * call_s)
        within = np.arange(self.max_gamma) < np.minimum(batch.caps, longest)[:, None]
        # Up to the longest draft of those whose last positions, however many, all bring their part.
        worth = np.cumsum(np.pad(batch.survival - PART * price, ((0, 0), (1, 0))), axis=1)
        best = np.zeros(self.num_rows, dtype=int)
        for row, cap in enumerate(within.sum(axis=1)):
            for gamma in range(1, cap + 1):
                if worth[row, gamma] > worth[row, best[row]]:
                    best[row] = gamma
        taken = np.arange(self.max_gamma) < best[:, None]
        gained = ((batch.survival - price) * taken).sum(axis=1)
        emitted = 1.0 + (batch.survival * taken).sum(axis=1)
        pays = (self.once_s <= 0.0) | (gained > pay * self.once_s * emitted)
        return np.where(batch.is_fixed, bare, taken.sum(axis=1) * pays)
