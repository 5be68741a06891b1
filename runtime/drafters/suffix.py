"""Suffix decoding: continue as the request itself, or earlier answers, continued after the same end.

For every length at which the context's end occurred before, the most frequent continuation is
followed; its score is the sum of its tokens' estimated probabilities. The best score wins, then the
longer match, then the request's own text. Scores are estimates, not laws: drafts are point masses.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from runtime.drafters.automaton import ROOT, SuffixAutomaton
from runtime.drafters.base import DrafterParts, DraftRow, Outcome, Traits
from runtime.drafters.chain import ChainDrafter
from runtime.drafters.scopes import Scoped

MAX_CANDIDATES = 6
"""Match lengths tried per automaton, longest first."""
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
            _append(self.automaton, answer)
            while self._num_tokens > self._max_tokens:
                self._remove(self._answers.popleft())
            if self._num_removed > self._max_tokens:
                self.automaton = SuffixAutomaton()
                self._num_removed = 0
                for one in self._answers:
                    _append(self.automaton, one)

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


@dataclass(slots=True)
class Candidate:
    """A continuation with its score and the length it was matched by."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    matched: int = 0


class SuffixDrafter(ChainDrafter[SuffixState]):
    """Proposes the best-scored continuation of what the context ended like before."""

    traits: ClassVar[Traits] = Traits(is_guesser=True, wants_outcomes=True)

    def __init__(self, *, factor: float, min_prob: float, max_tokens: int, max_scopes: int) -> None:
        super().__init__()
        self._factor = factor
        self._min_prob = min_prob
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
        )

    def new_state(self, row: DraftRow) -> SuffixState:
        """An empty automaton beside the scope's."""
        history = self._histories.of(row.scope)
        return SuffixState(history, history.automaton, row.sampling.num_prompt)

    def push(self, state: SuffixState, tokens: list[int]) -> None:
        """Append committed tokens, and follow them through the scope's automaton."""
        state.tokens += tokens
        for token in tokens:
            state.whole = state.own.append(state.whole, token)
        with state.history.lock:
            shared = state.history.automaton
            if shared is not state.shared:
                state.shared, state.state, state.matched = shared, ROOT, 0
                tokens = state.tokens[-REMATCH:]
            state.state = shared.settle(state.state, state.matched)
            for token in tokens:
                state.state, state.matched = shared.advance(state.state, state.matched, token)

    def extend(self, state: SuffixState, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """The better of the best continuations of the request's own text and of its scope's."""
        own = state.own
        at = max(own.link[state.whole], ROOT)
        best = self._best(own, at, own.length[at], drafted, length, num_own=int(not drafted))
        with state.history.lock:
            shared = state.history.automaton
            if shared is state.shared:
                at = shared.settle(state.state, state.matched)
                other = self._best(shared, at, state.matched, drafted, length, num_own=0)
                if other.score > best.score:
                    best = other
        return best.tokens

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
        self,
        automaton: SuffixAutomaton,
        state: int,
        matched: int,
        drafted: tuple[int, ...],
        length: int,
        *,
        num_own: int,
    ) -> Candidate:
        for token in drafted:
            state, matched = automaton.advance(state, matched, token)
        best = Candidate()
        for _ in range(MAX_CANDIDATES):
            if state == ROOT or matched == 0:
                break
            budget = min(length, int(self._factor * matched + 1e-6))
            found = self._follow(automaton, state, budget, num_own)
            found.matched = matched
            if found.score > best.score:
                best = found
            state = automaton.link[state]
            matched = automaton.length[state]
        return best

    def _follow(
        self, automaton: SuffixAutomaton, state: int, budget: int, num_own: int
    ) -> Candidate:
        """The most frequent continuation; ``num_own`` occurrences are the context's own end."""
        tokens: list[int] = []
        score, prob = 0.0, 1.0
        total = automaton.count[state] - num_own
        while len(tokens) < budget and total > 0:
            found = automaton.likeliest(state)
            if found is None:
                break
            token, state, count = found
            prob *= min(count / total, 1.0)
            if prob < self._min_prob:
                break
            tokens.append(token)
            score += prob
            total = count
        return Candidate(tokens=tuple(tokens), score=score)


def _append(automaton: SuffixAutomaton, tokens: list[int]) -> None:
    state = ROOT
    for token in tokens:
        state = automaton.append(state, token)
