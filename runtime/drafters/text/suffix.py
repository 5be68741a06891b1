"""Suffix decoding: continue as the request itself, or earlier answers, continued after the same end.

For every length at which the context's end occurred before, the most frequent continuation is
followed; its score is the sum of its tokens' estimated probabilities. The best score wins, then the
longer match, then the request's own text. Scores are estimates, not laws: drafts are point masses.
Where the row may carry a tree, what else followed the best match is proposed beside it.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from outrider.engines.base import IntArray
from outrider.runtime.core.drafting import HistoryScope, scope_of
from outrider.runtime.drafters.base import Draft, DrafterParts, DraftRow, Outcome, Text, Traits
from outrider.runtime.drafters.branches import Budget, as_draft, grow
from outrider.runtime.drafters.chain import cut_at_end
from outrider.runtime.drafters.scopes import Scoped
from outrider.runtime.drafters.text import automaton_loops as loops
from outrider.runtime.drafters.text.automaton import SuffixAutomaton
from outrider.runtime.drafters.text.suffix_texts import AnswerHistory, SuffixState, SuffixTexts


class SuffixDrafter:
    """Proposes the best-scored continuation of what the context ended like before."""

    traits: ClassVar[Traits] = Traits(is_guesser=True, proposes_trees=True, wants_outcomes=True)

    def __init__(
        self,
        *,
        factor: float,
        min_prob: float,
        max_tokens: int,
        max_scopes: int,
        parts: DrafterParts | None = None,
    ) -> None:
        self._factor = factor
        self._min_chain_prob = min_prob
        self._max_nodes = 0 if parts is None else parts.config.tree_nodes
        self._min_node_prob = 1.0 if parts is None else parts.config.min_node_prob
        self._histories = Scoped(lambda: AnswerHistory(max_tokens), max_scopes=max_scopes)
        self._texts = SuffixTexts(factor=factor)
        self._states: dict[str, SuffixState] = {}

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """With the server's thresholds and bounds."""
        config = parts.config
        return cls(
            factor=config.suffix_factor,
            min_prob=config.min_prob,
            max_tokens=config.max_history_tokens,
            max_scopes=config.max_scopes,
            parts=parts,
        )

    def continue_texts(
        self, texts: Sequence[Text], lengths: Sequence[int], scope: HistoryScope
    ) -> list[tuple[int, ...]]:
        """The best continuation of each text."""
        asked: list[int] = []
        states = self._states
        for text, length in zip(texts, lengths, strict=True):
            key = text.spec.internal_id
            state = states.get(key)
            if state is None:
                state = self._entered(key, scope_of(scope, text.spec.tenant), text.num_prompt)
            if state.tokens is not text.tokens:
                self._texts.hold(state, text.tokens)
            state.num_told = known = text.num_known
            asked += (state.place, known, length)
        found = self._texts.continuations(asked, max(lengths), min_prob=self._min_chain_prob)
        return [
            cut_at_end(tokens, text.spec.params.end_token_ids) if tokens else tokens
            for tokens, text in zip(found, texts, strict=True)
        ]

    def note_texts(self, texts: Sequence[Text]) -> None:
        """Know how far texts are committed; their tokens are read when the next are wanted."""
        for text in texts:
            self._states[text.spec.internal_id].num_told = text.num_known

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """A tree, or a chain with its score, per chosen slot."""
        return [self._draft(live[slot]) for slot in chosen]

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Continue the committed tokens and ``drafted``; see ``Guesser``."""
        return self._best(self._state_of(row), drafted, length, self._min_chain_prob)[0]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See every committed token, the last ones too."""
        for outcome in outcomes:
            self._state_of(outcome.row)

    def forget(self, key: str) -> None:
        """Add the answer to its scope's history."""
        state = self._states.pop(key, None)
        if state is not None:
            self._texts.leave(state)

    def _entered(self, key: str, scope: str | None, num_prompt: int) -> SuffixState:
        state = self._states[key] = self._texts.enter(self._histories.of(scope), num_prompt)
        return state

    def _state_of(self, row: DraftRow) -> SuffixState:
        """The row's state, told of its committed tokens."""
        state = self._states.get(row.key)
        if state is None:
            state = self._entered(row.key, row.scope, row.sampling.num_prompt)
        history: IntArray = row.sampling.history
        self._texts.hold(state, history)
        state.num_told = len(history)
        return state

    def _best(
        self, state: SuffixState, drafted: tuple[int, ...], length: int, min_prob: float
    ) -> tuple[tuple[int, ...], bool, list[float]]:
        """Tokens, whether they are the scope's, and their figures."""
        (tokens,) = self._texts.continuations(
            (state.place, state.num_told, length),
            length,
            min_prob=min_prob,
            drafted=drafted,
        )
        own, shared = self._texts.figures[0].tolist()
        is_shared = shared[loops.SCORE] > own[loops.SCORE]
        return tokens, is_shared, shared if is_shared else own

    def _draft(self, row: DraftRow) -> Draft:
        state, ends = self._state_of(row), row.sampling.params.end_token_ids
        budget = Budget.of_row(row, max_nodes=self._max_nodes, min_prob=self._min_node_prob)
        if budget is not None:
            return as_draft(*self._tree(state, budget, ends))
        tokens, _, figures = self._best(state, (), row.gamma, self._min_chain_prob)
        tokens = cut_at_end(tokens, ends)
        return Draft(tokens=tokens, expected=min(figures[loops.SCORE], float(len(tokens))))

    def _tree(
        self, state: SuffixState, budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All that followed the best match, likeliest first."""
        _, is_shared, figures = self._best(state, (), budget.max_depth, budget.min_prob)
        automaton: SuffixAutomaton = state.history.automaton if is_shared else state.own
        place, total = int(figures[loops.STATE]), int(figures[loops.TOTAL])
        depth = min(budget.max_depth, int(self._factor * figures[loops.MATCHED] + 1e-6))
        if depth == 0 or total <= 0:
            return (), ()

        def followers(place: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
            state, total = place
            return [
                (token, min(count / total, 1.0), (behind, count))
                for token, behind, count in automaton.followers(state)
            ]

        return grow((place, total), followers, replace(budget, max_depth=depth), ends)
