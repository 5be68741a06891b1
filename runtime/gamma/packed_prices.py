"""What steps cost where engines pack rows: by the total of tokens, and each draft call by its rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from outrider.runtime.gamma.acceptance import Rates
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.gamma.packed_loops import KIND

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrices:
    """Of steps over so many rows.

    Attributes:
        verify_s: [n * G + 1] seconds of a step without draft calls, by its draft tokens in all.
        calls_s: [n + 1] seconds of one draft call, by its rows.
        listed: [kinds] seconds that the host spends on a row, and on each of its draft tokens, and both of the above:
            as lists, since to take a number out of an array costs what adding up a step does.
    """

    verify_s: Rates
    calls_s: Rates
    listed: tuple[list[float], ...]

    @classmethod
    def of(
        cls, table: CostTable, host_s: Rates, num_rows: int, capacity: int, max_gamma: int
    ) -> PackedPrices:
        """Spans of all lengths cost what as many tokens of spans alike do.

        Args:
            table: measured costs, of spans alike.
            host_s: [2, kinds] seconds that the host spends on a row, and on each of its draft tokens.
            num_rows: of the engine call.
            capacity: cache positions per row.
            max_gamma: G.
        """
        host, draft = table.host, table.draft
        alike_s = [
            table.target.extend_s(num_rows, width, capacity) for width in range(1, max_gamma + 2)
        ]
        totals = np.arange(num_rows * max_gamma + 1)
        verify_s = host.step_s + np.interp(totals / num_rows, np.arange(max_gamma + 1), alike_s)
        calls_s = np.zeros(num_rows + 1)
        for rows in range(1, num_rows + 1):
            calls_s[rows] = host.call_s + (draft.extend_s(rows, 1, capacity) if draft else 0.0)
        listed = *host_s.tolist(), verify_s.tolist(), calls_s.tolist()
        return cls(verify_s=verify_s, calls_s=calls_s, listed=listed)


class PackedStep:
    """What a step over certain rows costs.

    Args:
        prices: of as many rows.
        facts: [6, n] of the rows, as in ``forecast.Batch``; must not change.
    """

    def __init__(self, prices: PackedPrices, facts: Ints) -> None:
        self._prices, self._facts = prices, facts
        # Steps of one decision are mostly alike.
        self._known: dict[Hashable, float] = {}

    def table_s(self, drafted: tuple[tuple[int, int, int], ...]) -> float:
        """Tabled seconds of a step.

        Args:
            drafted: row and length of each draft, and tokens of it that the draft model was called for.
        """
        known = self._known.get(drafted)
        if known is None:
            known = self._known[drafted] = self._sum(drafted)
        return known

    def _sum(self, drafted: Sequence[tuple[int, int, int]]) -> float:
        row_s, token_s, verify_s, calls_s = self._prices.listed
        kinds = self._facts[KIND].tolist()
        seconds: float = sum([row_s[kind] for kind in kinds])
        total, num_calling = 0, [0] * max([calls for _, _, calls in drafted], default=0)
        for row, length, calls in drafted:
            # Others may decode by now.
            if row < len(kinds):
                total += length
                seconds += length * token_s[kinds[row]]
                for position in range(calls):
                    num_calling[position] += 1
        return seconds + verify_s[total] + sum([calls_s[rows] for rows in num_calling])
