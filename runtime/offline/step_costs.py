"""Costs of a machine's cost table in the symbols of the formulas: c and v(k)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Return the seconds of a target pass over this many tokens per row."""
        capacity = self.table.capacity_for(self.num_cached)
        return self.table.target.extend_s(self.batch, num_tokens, capacity)

    def step_s(self, num_tokens: int) -> float:
        """Return the seconds of a step that drafts nothing and verifies this many tokens per row."""
        host = self.table.host
        return self.target_s(num_tokens) + host.step_s + self.batch * host.rows[self.kind].row_s

    def draft_s(self, *, uses_model: bool) -> float:
        """Return the seconds of one draft token of every row."""
        host, draft = self.table.host, self.table.draft
        seconds = self.batch * host.rows[self.kind].token_s
        if uses_model and draft is not None:
            capacity = self.table.capacity_for(self.num_cached)
            seconds += draft.extend_s(self.batch, 1, capacity) + host.call_s
        return seconds

    def c(self, *, uses_model: bool) -> float:
        """Return c: one draft token over a plain step."""
        return self.draft_s(uses_model=uses_model) / self.step_s(1)

    def v(self, num_tokens: int) -> float:
        """Return the cost of a step that verifies k tokens per row over a plain step; 1 at k = 1."""
        return self.step_s(num_tokens) / self.step_s(1)

    def row(
        self, temperature: float, drafters: Mapping[str, bool], num_tokens: Sequence[int]
    ) -> CostRow:
        """Return the costs of an analysis: c of each drafter, which calls the model or not, and v(k) of each k."""
        return CostRow(
            temperature=temperature,
            plain_ms=1e3 * self.step_s(1),
            draft_cost={name: self.c(uses_model=uses) for name, uses in drafters.items()},
            verify_cost={k: self.v(k) for k in num_tokens},
            target_ms={k: 1e3 * self.target_s(k) for k in num_tokens},
        )
