"""From a machine's cost table to the symbols of the formulas: c and v(k)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.offline.results import CostRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of steps of one kind of rows at one batch size, sampling and host work included.

    Attributes:
        batch: rows that decode together.
        num_cached: tokens of the longest row's cache.
    """

    table: CostTable
    kind: RowKind
    batch: int = 1
    num_cached: int = 1

    def target_s(self, num_tokens: int) -> float:
        """Seconds of a target pass over this many tokens per row."""
        capacity = self.table.capacity_for(self.num_cached)
        return self.table.target.extend_s(self.batch, num_tokens, capacity)

    def step_s(self, num_tokens: int) -> float:
        """Seconds of a step that drafts nothing new and verifies this many tokens per row."""
        host = self.table.host
        return self.target_s(num_tokens) + host.step_s + self.batch * host.rows[self.kind].row_s

    def draft_s(self, *, uses_model: bool) -> float:
        """Seconds of one draft token of every row."""
        host, draft = self.table.host, self.table.draft
        seconds = self.batch * host.rows[self.kind].token_s
        if uses_model and draft is not None:
            capacity = self.table.capacity_for(self.num_cached)
            seconds += draft.extend_s(self.batch, 1, capacity) + host.call_s
        return seconds

    def c(self, *, uses_model: bool) -> float:
        """Draft token over plain step."""
        return self.draft_s(uses_model=uses_model) / self.step_s(1)

    def v(self, num_tokens: int) -> float:
        """A step that verifies so many tokens per row, over a plain step: 1 for one token."""
        return self.step_s(num_tokens) / self.step_s(1)


def cost_row(
    costs: StepCosts, temperature: float, drafters: dict[str, bool], num_tokens: Iterable[int]
) -> CostRow:
    """The costs as an analysis states them.

    Args:
        costs: of the rows of this temperature.
        temperature: of the rows.
        drafters: name -> whether it calls the draft model.
        num_tokens: where v is wanted.
    """
    wanted = tuple(num_tokens)
    return CostRow(
        temperature=temperature,
        plain_ms=1e3 * costs.step_s(1),
        draft_cost={name: costs.c(uses_model=uses) for name, uses in drafters.items()},
        verify_cost={k: costs.v(k) for k in wanted},
        target_ms={k: 1e3 * costs.target_s(k) for k in wanted},
    )
