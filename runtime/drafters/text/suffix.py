"""Suffix decoding: continue as the request itself, or earlier answers, continued after the same end.

For every length at which the context's end occurred before, the most frequent continuation is
followed; its score is the sum of its tokens' estimated probabilities. The best score wins, then the
longer match, then the request's own text. Scores are estimates only: drafts are point masses.
Where the row may carry a tree, what else followed the best match is proposed beside it.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import Draft, DrafterCapabilities, DraftRow, Outcome
from outrider.runtime.drafters.branches import BranchingDrafter, Budget, grow
from outrider.runtime.drafters.chain import cut_at_end
from outrider.runtime.drafters.scopes import Scoped
from outrider.runtime.drafters.text.automaton import ROOT, Continuation, SuffixAutomaton
from outrider.runtime.drafters.text.history import AnswerHistory

REMATCH = 64
"""Tokens followed again through a scope's automaton that was built anew."""


@dataclass(slots=True)
class SuffixState:
    """One request.

    Attributes:
        history: earlier answers of its scope.
        num_prompt: leading tokens that are not part of the answer.
        tokens: committed ones, without a source.
        own: automaton of its own text, and of the source.
        whole: state of all of the text there.
        match: state and length of the text's longest end that the history's automaton knows.
        num_cleared: of that automaton when the match was found.
    """

    history: AnswerHistory
    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    whole: int = ROOT
    match: tuple[int, int] = (ROOT, 0)
    num_cleared: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin where the history stands."""
        self.num_cleared = self.history.automaton.num_cleared

    def push(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        self.tokens += tokens
        self.whole = self.own.append(self.whole, tokens)
        self.follow(tokens)

    def begin_anew(self) -> None:
        """Take what comes next for the beginning of a text; what was pushed before stays known."""
        self.tokens.clear()
        self.whole, self.match = ROOT, (ROOT, 0)

    def follow(self, tokens: list[int]) -> None:
        """Bring the match up to date with the text's newest tokens, and with a history that was built anew."""
        shared = self.history.automaton
        if self.num_cleared != shared.num_cleared:
            self.num_cleared, self.match = shared.num_cleared, (ROOT, 0)
            tokens = self.tokens[-REMATCH:]
        if tokens and len(self.history):
            self.match = shared.advance(*self.match, tokens)


class SuffixDrafter(BranchingDrafter[SuffixState]):
    """Proposes the best-scored continuation of what the context ended like before."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        is_guesser=True, proposes_trees=True, wants_outcomes=True
    )

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__(config)
        self._factor = config.suffix_factor
        self._histories = Scoped(
            lambda: AnswerHistory(config.max_history_tokens), max_scopes=config.max_scopes
        )

    def new_state(self, row: DraftRow) -> SuffixState:
        """Return the state of a request that nothing was seen of."""
        return SuffixState(self._histories.of(row.scope), row.sampling.num_prompt)

    def push(self, state: SuffixState, tokens: list[int]) -> None:
        """Take in committed tokens."""
        state.push(tokens)

    def end_text(self, state: SuffixState) -> None:
        """Keep the source apart from the answer."""
        state.begin_anew()

    def extend(self, state: SuffixState, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return the best continuation of the request's own text and its scope's answers."""
        found = self._best(state, drafted, length, self._config.min_prob)[1]
        return tuple(found.tokens.tolist())

    def chain(self, row: DraftRow) -> Draft:
        """Return the best continuation, with its score."""
        _, found = self._best(self.state_of(row), (), row.gamma, self._config.min_prob)
        tokens = cut_at_end(tuple(found.tokens.tolist()), row.sampling.params.end_token_ids)
        return Draft(tokens=tokens, expected=min(found.score, float(len(tokens))))

    def branch(
        self, state: SuffixState, budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return all that followed the best match, likeliest first."""
        automaton, found = self._best(state, (), budget.max_depth, budget.min_prob)
        depth = min(budget.max_depth, int(self._factor * found.matched + 1e-6))
        if depth == 0 or found.total <= 0:
            return (), ()

        def followers(place: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
            state, total = place
            return [
                (token, min(count / total, 1.0), (behind, count))
                for token, behind, count in automaton.followers(state)
            ]

        return grow((found.state, found.total), followers, replace(budget, max_depth=depth), ends)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See every committed token, the last ones too."""
        for outcome in outcomes:
            self.state_of(outcome.row)

    def forget(self, key: str) -> None:
        """Add the answer to its scope's history."""
        state = self._states.get(key)
        super().forget(key)
        if state is not None and len(state.tokens) > state.num_prompt:
            state.history.add(state.tokens[state.num_prompt :])

    def _best(
        self, state: SuffixState, drafted: tuple[int, ...], length: int, min_prob: float
    ) -> tuple[SuffixAutomaton, Continuation]:
        """Return the better continuation of the own text's and the history's, and whose it is."""
        state.follow([])
        own, history = state.own, state.history
        found = own.continuation(
            own.longest_earlier(state.whole), drafted, length,
            factor=self._factor, min_prob=min_prob, is_own_end=True,
        )  # fmt: skip
        if not len(history):
            return own, found
        shared = history.automaton.continuation(
            state.match, drafted, length, factor=self._factor, min_prob=min_prob
        )
        return (history.automaton, shared) if shared.score > found.score else (own, found)
