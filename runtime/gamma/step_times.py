"""What steps of live requests take: as the cost table says, corrected by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import num_left_out
from outrider.runtime.core.request import Request
from outrider.runtime.gamma.costs import CostTable, RowCosts, RowKind, RowPrices, StepPrices
from outrider.runtime.gamma.guard import Ratios


class StepTimes:
    """Seconds of steps, by their rows and draft tokens.

    Args:
        table: measured costs of the worker's engines.
        max_gamma: G, draft tokens of one row at most.
        max_shared_missing: tokens a row may miss and still be fed with the others.
        uses_model: returns True for the name of a drafter that calls the draft model.
        packs_rows: True where the engines' calls cost by the total of their tokens.
        leaves_out: True where the draft model reads the end of a long prompt alone.

    Attributes:
        ratios: measured over tabled seconds.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        max_gamma: int,
        max_shared_missing: int,
        uses_model: Callable[[str], bool],
        packs_rows: bool,
        leaves_out: bool = False,
    ) -> None:
        self._leaves_out = leaves_out
        self._prices = StepPrices(table, max_gamma=max_gamma, packs_rows=packs_rows)
        self._host = table.host.rows
        self._most_missing = max_shared_missing
        # Callers compose names of drafters: no more are kept than are served at once.
        self._uses_model = lru_cache(maxsize=256)(uses_model)
        self.ratios = Ratios()

    def of_rows(self, rows: Sequence[Request], num_rows: int) -> RowPrices:
        """Return the tabled prices of steps in which ``num_rows`` of these rows decode."""
        return self._prices.of_rows(num_rows, max([row.sequence.num_known for row in rows]))

    def plain_s(self, num_rows: int) -> float:
        """Return the tabled seconds of a plain step, at the smallest size of the cache."""
        return self._prices.of_rows(num_rows, 0).verify_s[0]

    def drafted_s(self, num_rows: int, num_drafted: int) -> float:
        """Return the expected seconds of a step that verifies so many draft tokens of one row, at the same size."""
        prices = self._prices.of_rows(num_rows, 0)
        tabled_s = prices.step_s(num_drafted, num_drafted, [num_drafted], 0.0)
        return tabled_s * self.ratios.of(num_rows, num_drafted)

    def steps_s(self, drafter: str, kind: RowKind, num_rows: int) -> list[float]:
        """Return the seconds of steps of equal rows by the draft tokens of each, 0..G, at the same size."""
        prices, host = self._prices.of_rows(num_rows, 0), self._host[kind]
        calls = [num_rows] * len(prices.verify_s) if self._uses_model(drafter) else []
        num_lengths = (len(prices.verify_s) - 1) // num_rows + 1
        return [
            self.ratios.of(num_rows, one)
            * prices.step_s(
                one * num_rows, one, calls[:one], num_rows * (host.row_s + one * host.token_s)
            )
            for one in range(num_lengths)
        ]

    def host(self, row: Request) -> RowCosts:
        """Return what the host spends on a row and its tokens."""
        if row.spec.params.is_greedy:
            return self._host[RowKind.GREEDY]
        is_stable = row.spec.speculation.mode is ExactnessMode.SEED_STABLE
        return self._host[RowKind.STABLE if is_stable else RowKind.SAMPLED]

    def uses_model(self, row: Request) -> bool:
        """Return whether the draft model is called for a row."""
        return self._uses_model(row.speculation.drafter)

    def missed_s(self, row: Request) -> float:
        """Return the seconds to feed the draft model what a row missed, beyond what is fed along anyway.

        A machine on which plain steps take longer than the table says, or less, takes so for this too.
        """
        if not self.uses_model(row):
            return 0.0
        computed = row.cache.draft_computed
        read_s = self._prices.read_s(len(row.spec.source_tokens)) if computed < 0 else 0.0
        num_known = row.sequence.num_known
        if self._leaves_out and row.speculation.is_adaptive and not row.group.name:
            computed = max(computed, num_left_out(num_known, row.sequence.num_remaining))
        num_missing = num_known - max(computed, 0)
        if num_missing <= self._most_missing:
            return self.ratios.of(1, 0) * read_s
        return self.ratios.of(1, 0) * (read_s + self._prices.catch_up_s(num_missing - 1))
