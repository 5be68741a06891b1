"""Lookahead decoding: the target itself advances a window of guesses, whose phrases are its drafts.

Every pass verifies the phrases that the pool holds for the last token and moves the window on by
one token; what the window found goes into the pool. Needs no model but the target, and trees: rows
that take none draft from the pool alone, which then learns from committed and rejected tokens only.

Source: Fu et al. 2024 (arXiv:2402.02057).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.core.tree import TreeBuilder
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Outcome,
)
from outrider.runtime.drafters.branches import as_draft
from outrider.runtime.drafters.phrases.phrases import PhraseDrafter
from outrider.runtime.drafters.phrases.window import LookaheadWindow, window_nodes


@dataclass(frozen=True, slots=True)
class Placed:
    """A window in a draft: the draft's tokens, and the last node of each of the window's columns."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...]


class LookaheadDrafter(PhraseDrafter):
    """Proposes phrases of the pool, and a window beside them that finds new ones.

    Args:
        max_gamma: depth of a draft at most, which bounds W too.
        max_nodes: tokens of a tree that the target verifies, its root left out.
    """

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        proposes_trees=True, num_choices=1, wants_outcomes=True
    )

    def __init__(self, config: DraftingConfig, *, max_gamma: int, max_nodes: int = 0) -> None:
        # The pool is nothing without what the target chose behind the window.
        super().__init__(replace(config, harvests_rejected=True))
        self._max_gamma, self._max_nodes = max_gamma, max_nodes
        self._windows: dict[str, LookaheadWindow] = {}
        self._placed: dict[str, Placed] = {}

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build it with the server's bounds."""
        return cls(parts.config, max_gamma=parts.max_gamma, max_nodes=parts.max_nodes)

    def check(self, params: SpeculationParams, gamma: int) -> None:
        """Refuse a window that was asked for and finds no room; the default is as wide as fits."""
        if not params.window:
            return
        length = params.phrase_length or self._config.phrase_length
        depth, nodes = params.window + length - 2, window_nodes(params.window, length)
        if depth > gamma:
            raise RequestError("speculation.window", f"needs a gamma of {depth}: it is {gamma}")
        if nodes > self._max_nodes:
            rule = f"needs trees of {nodes} draft tokens: the target verifies {self._max_nodes}"
            raise RequestError("speculation.window", rule)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Move windows on by the target's choices, and keep the phrases they found."""
        super().observe(outcomes)
        for outcome in outcomes:
            placed = self._placed.pop(outcome.row.key, None)
            if placed is None or placed.tokens != outcome.draft_tokens or not outcome.choices:
                continue
            last = int(outcome.row.text[outcome.num_fed - 1])
            chosen = [outcome.choices[node][0] for node in placed.ends]
            ends = outcome.row.sampling.params.end_token_ids
            found = self._windows[outcome.row.key].advance(last, chosen, ends)
            self.state_of(outcome.row).pool.put_all(found)

    def forget(self, key: str) -> None:
        """Drop the request's window; its phrases stay in the pool."""
        self._windows.pop(key, None)
        self._placed.pop(key, None)
        super().forget(key)

    def draft(self, row: DraftRow) -> Draft:
        """Return phrases of the pool, and the window beside them where the row has room."""
        self._placed.pop(row.key, None)
        # Rows that carry no trees have no room for one.
        window = self._window_of(row) if row.max_nodes else None
        if window is None or window.depth > row.gamma or window.num_nodes > row.max_nodes:
            return super().draft(row)
        tree = TreeBuilder()
        for chain in self.chains(row):
            tree.add_chain(chain, max_nodes=row.max_nodes - window.num_nodes)
        ends = window.place(tree)
        draft = as_draft(tuple(tree.tokens), tuple(tree.parents))
        self._placed[row.key] = Placed(draft.tokens, tuple(ends))
        return draft

    def _window_of(self, row: DraftRow) -> LookaheadWindow | None:
        """Return the row's window, as wide as its drafts are deep at most; None where there is none."""
        found = self._windows.get(row.key)
        if found is not None:
            return found
        length = self.state_of(row).phrase_length
        asked = self._config.window if row.params.window is None else row.params.window
        deepest = self._max_gamma if row.params.gamma is None else row.params.gamma
        width = min(asked, deepest - length + 2)
        if width < 1 or length < 2:
            return None
        text = [token for token in row.text.tolist() if token >= 0]
        found = LookaheadWindow.from_text(text, width=width, phrase_length=length)
        self._windows[row.key] = found
        return found
