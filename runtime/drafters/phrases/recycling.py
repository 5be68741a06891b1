"""Token recycling: what the target last found likely after a token is proposed after it again.

After every verification the most likely tokens of each position, rejected ones included, are kept
under the token of that position. A tree opens the likeliest of them first, by how often a rank
turned out to be the first the next time; a chain follows the first ones for as long as the share
with which they proved stable stays above a threshold.

Source: Luo et al. 2024, "Turning Trash into Treasure" (arXiv:2408.08696); there a fixed tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DrafterCapabilities, DraftRow, Outcome
from outrider.runtime.drafters.branches import BranchingDrafter, Budget, grow
from outrider.runtime.drafters.scopes import Scoped

WIDTH = 8
"""Successors kept per token."""
FIRST_SHARE = 0.5
MEMORY = 0.75
"""Weight of what was known against the newest observation."""


def _first_ranks() -> list[float]:
    """Return the counts assumed at first: each rank half as likely as the one before."""
    return [0.5**rank for rank in range(1, WIDTH + 2)]


@dataclass(slots=True)
class Successors:
    """Per token its likely successors, likeliest first, and how often the first stayed first.

    At most one entry per token of the vocabulary.

    Attributes:
        ranks: how often the first successor had held each rank before, behind all that it had none.
    """

    after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)
    ranks: list[float] = field(default_factory=_first_ranks)

    def learn(self, token: int, choices: tuple[int, ...]) -> None:
        """Replace the known successors of a token."""
        known = self.after.get(token)
        if known is None:
            self.share[token] = FIRST_SHARE
        else:
            is_stable = known[0] == choices[0]
            self.share[token] = MEMORY * self.share[token] + (1.0 - MEMORY) * is_stable
            self.ranks[known.index(choices[0]) if choices[0] in known else WIDTH] += 1.0
        self.after[token] = choices

    def followers(self, token: int) -> list[tuple[int, float, int]]:
        """Return tokens that may follow a token, their estimated probabilities, and the places behind them."""
        known = dict.fromkeys(self.after.get(token, ()))
        if not known:
            return []
        share, others = self.share[token], sum(self.ranks[1:])
        first, *rest = known
        found = [(first, share, first)]
        for rank, one in enumerate(rest, start=1):
            found.append((one, (1.0 - share) * self.ranks[rank] / others, one))
        return sorted(found, key=lambda entry: -entry[1])


@dataclass(slots=True)
class RecyclingState:
    """One request: the successors of its scope, and its last token."""

    successors: Successors
    last: int | None = None


class RecyclingDrafter(BranchingDrafter[RecyclingState]):
    """Proposes trees of likely successors, or the chain of the likeliest."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        is_guesser=True, proposes_trees=True, num_choices=WIDTH, wants_outcomes=True
    )

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__(config)
        self._successors = Scoped(Successors, max_scopes=config.max_scopes)

    def new_state(self, row: DraftRow) -> RecyclingState:
        """Return a state on the successors of the row's scope."""
        return RecyclingState(self._successors.of(row.scope))

    def push(self, state: RecyclingState, tokens: list[int]) -> None:
        """Keep the last token."""
        state.last = tokens[-1]

    def end_text(self, state: RecyclingState) -> None:
        """Keep the successors alone."""
        state.last = None

    def extend(
        self, state: RecyclingState, drafted: tuple[int, ...], length: int
    ) -> tuple[int, ...]:
        """Return the likeliest successor of the last token, of that one, and so on."""
        after, share = state.successors.after, state.successors.share
        token = drafted[-1] if drafted else state.last
        chain: list[int] = []
        prob = 1.0
        while len(chain) < length and token in after:
            assert token is not None
            prob *= share[token]
            if prob < self._config.min_prob:
                break
            token = after[token][0]
            chain.append(token)
        return tuple(chain)

    def branch(
        self, state: RecyclingState, budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a tree of the likeliest successors of the last token, and of those."""
        if state.last is None:
            return (), ()
        return grow(state.last, state.successors.followers, budget, ends)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the choices of every verified position, in order, under its token."""
        for outcome in outcomes:
            state = self.state_of(outcome.row)
            root = int(outcome.row.text[outcome.num_fed - 1])
            fed = (root, *outcome.draft_tokens)
            for token, choices in zip(fed, outcome.choices, strict=False):
                state.successors.learn(token, choices)
