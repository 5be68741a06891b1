"""Suffix decoding: continue as the request itself, or earlier answers, continued after the same end.

For every length at which the context's end occurred before, the most frequent continuation is
followed; its score is the sum of its tokens' estimated probabilities. The best score wins, then the
longer match, then the request's own text. Scores are estimates, not laws: drafts are point masses.
Where the row may carry a tree, what else followed the best match is proposed beside it.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from runtime.drafters.automaton import ROOT, Continuation, SuffixAutomaton
from runtime.drafters.base import Draft, DrafterParts, DraftRow, Outcome, Traits
from runtime.drafters.branches import BranchingDrafter, Budget, grow
from runtime.drafters.chain import cut_at_end
from runtime.drafters.scopes import Scoped

REMATCH = 64
"""Tokens walked again when the shared automaton was rebuilt."""


class AnswerHistory:
    """Earlier answers as one automaton; the oldest answer goes first. Thread-safe by its lock.

    Removed answers leave states without occurrences behind; when these outweigh the rest, the
    automaton is built anew.

    Args:
        max_tokens: tokens of all answers together.
    """

    def __init__(self, max_tokens: int) -> None:
        self.lock = threading.Lock()
        self.automaton = SuffixAutomaton()
        self._max_tokens = max_tokens
        self._answers: deque[list[int]] = deque()
        self._num_tokens = 0
        self._num_removed = 0

    def __len__(self) -> int:
        """Tokens held."""
        return self._num_tokens

    def add(self, answer: list[int]) -> None:
        """Take in an answer, of a very long one its end."""
        answer = answer[-self._max_tokens :]
        with self.lock:
            self._answers.append(answer)
            self._num_tokens += len(answer)
            self.automaton.append(ROOT, answer)
            while self._num_tokens > self._max_tokens:
                self._remove(self._answers.popleft())
            if self._num_removed > self._max_tokens:
                self.automaton = SuffixAutomaton()
                self._num_removed = 0
                for one in self._answers:
                    self.automaton.append(ROOT, one)

    def _remove(self, answer: list[int]) -> None:
        self.automaton.remove(answer)
        self._num_tokens -= len(answer)
        self._num_removed += len(answer)


@dataclass(slots=True)
class SuffixState:
    """One request: its own automaton, and where it stands in that of its scope.

    Attributes:
        whole: state of the request's whole text in ``own``.
        shared: automaton that ``state`` and ``matched`` refer to.
        num_prompt: leading tokens that are not part of the answer.
    """

    history: AnswerHistory
    shared: SuffixAutomaton
    num_prompt: int
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    tokens: list[int] = field(default_factory=list)
    whole: int = ROOT
    state: int = ROOT
    matched: int = 0


class SuffixDrafter(BranchingDrafter[SuffixState]):
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
        super().__init__(parts)
        self._factor = factor
        self._min_chain_prob = min_prob
        self._histories = Scoped(lambda: AnswerHistory(max_tokens), max_scopes=max_scopes)

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

    def new_state(self, row: DraftRow) -> SuffixState:
        """An empty automaton beside the scope's."""
        history = self._histories.of(row.scope)
        return SuffixState(history, history.automaton, row.sampling.num_prompt)

    def push(self, state: SuffixState, tokens: list[int]) -> None:
        """Append committed tokens, and follow them through the scope's automaton."""
        state.tokens += tokens
        state.whole = state.own.append(state.whole, tokens)
        with state.history.lock:
            shared = state.history.automaton
            if shared is not state.shared:
                state.shared, state.state, state.matched = shared, ROOT, 0
                tokens = state.tokens[-REMATCH:]
            state.state, state.matched = shared.advance(state.state, state.matched, tokens)

    def extend(self, state: SuffixState, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """The better of the best continuations of the request's own text and of its scope's."""
        return self._continuation(state, drafted, length).tokens

    def chain(self, row: DraftRow) -> Draft:
        """The best continuation, with its score."""
        best = self._continuation(self.state_of(row), (), row.gamma)
        tokens = cut_at_end(best.tokens, row.sampling.law.end_token_ids)
        return Draft(tokens=tokens, expected=min(best.score, float(len(tokens))))

    def _continuation(
        self, state: SuffixState, drafted: tuple[int, ...], length: int
    ) -> Continuation:
        least = self._min_chain_prob
        own = self._best_own(state, drafted, length, least)
        with state.history.lock:
            other = self._best_shared(state, drafted, length, least)
        return other if other.score > own.score else own

    def branch(
        self, state: SuffixState, budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All that followed the best match, likeliest first."""
        best = self._best_own(state, (), budget.max_depth, budget.min_prob)
        with state.history.lock:
            other = self._best_shared(state, (), budget.max_depth, budget.min_prob)
            if other.score > best.score:
                return self._grown(state.shared, other, budget, ends)
        return self._grown(state.own, best, budget, ends)

    def _grown(
        self,
        automaton: SuffixAutomaton,
        match: Continuation,
        budget: Budget,
        ends: Collection[int],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        depth = min(budget.max_depth, int(self._factor * match.matched + 1e-6))
        if depth == 0 or match.total <= 0:
            return (), ()

        def followers(place: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
            state, total = place
            return [
                (token, min(count / total, 1.0), (behind, count))
                for token, behind, count in automaton.followers(state)
            ]

        return grow((match.state, match.total), followers, replace(budget, max_depth=depth), ends)

    def _best_own(
        self, state: SuffixState, drafted: tuple[int, ...], length: int, min_prob: float
    ) -> Continuation:
        own = state.own
        at, matched = own.suffix(state.whole)
        if drafted:
            at, matched = own.advance(at, matched, drafted)
        return own.continuation(
            at,
            matched,
            factor=self._factor,
            length=length,
            min_prob=min_prob,
            is_own_end=not drafted,
        )

    def _best_shared(
        self, state: SuffixState, drafted: tuple[int, ...], length: int, min_prob: float
    ) -> Continuation:
        """Under the history's lock; nothing where the automaton was rebuilt since the last token."""
        shared = state.history.automaton
        if shared is not state.shared:
            return Continuation()
        at, matched = shared.advance(state.state, state.matched, drafted)
        return shared.continuation(
            at, matched, factor=self._factor, length=length, min_prob=min_prob, is_own_end=False
        )

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
