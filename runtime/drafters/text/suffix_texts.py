"""Texts of requests and of earlier answers as automata, continued in one compiled call for many requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from outrider.engines.base import IntArray
from outrider.engines.jit import address
from outrider.runtime.drafters.chain import pieces
from outrider.runtime.drafters.text import automaton_loops as loops
from outrider.runtime.drafters.text.automaton import ROOT, SuffixAutomaton

_NOTHING = np.zeros(0, dtype=np.int64)


class AnswerHistory:
    """Earlier answers as one automaton; the oldest answer goes first.

    Removed answers leave states without occurrences behind; when these outweigh the rest, the
    automaton is built anew.

    Args:
        max_tokens: tokens of all answers together.
    """

    def __init__(self, max_tokens: int) -> None:
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
        self._answers.append(answer)
        self._num_tokens += len(answer)
        self.automaton.append(ROOT, answer)
        while self._num_tokens > self._max_tokens:
            self._remove(self._answers.popleft())
        if self._num_removed > self._max_tokens:
            self.automaton.clear()
            self._num_removed = 0
            for one in self._answers:
                self.automaton.append(ROOT, one)

    def _remove(self, answer: list[int]) -> None:
        self.automaton.remove(answer)
        self._num_tokens -= len(answer)
        self._num_removed += len(answer)


@dataclass(slots=True)
class SuffixState:
    """One request.

    Attributes:
        place: its row in the table of texts.
        history: of its scope.
        num_prompt: leading tokens that are not part of the answer.
        tokens: [N] int64, of which at least ``num_told`` are committed; kept, since loops read from its address.
        num_told: tokens that the drafter was told of or asked to continue.
        own: automaton of its own text.
    """

    place: int
    history: AnswerHistory
    num_prompt: int
    tokens: IntArray = field(default_factory=lambda: _NOTHING)
    num_told: int = 0
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class SuffixTexts:
    """Where all requests stand, in one table.

    Attributes:
        figures: [n, 2, 4], of the texts that were continued last, as ``loops.continue_texts`` writes them.
    """

    def __init__(self, *, factor: float) -> None:
        self._factor = factor
        self._states: list[SuffixState | None] = []
        self._table = np.zeros((0, loops.FOUND_IN + 1), dtype=np.int64)
        self._num_rows = self._most_wanted = 0
        self._make_room(8, 8)

    def enter(self, history: AnswerHistory, num_prompt: int) -> SuffixState:
        """A request of which nothing was seen yet."""
        if None not in self._states:
            self._states += [None] * (len(self._states) or 8)
            table = np.zeros((len(self._states), self._table.shape[1]), dtype=np.int64)
            table[: len(self._table)] = self._table
            self._table = table
        place = self._states.index(None)
        state = self._states[place] = SuffixState(place, history, num_prompt)
        cleared = history.automaton.used[loops.CLEARED]
        self._table[place] = state.own.at, history.automaton.at, 0, 0, ROOT, ROOT, 0, cleared
        return state

    def hold(self, state: SuffixState, tokens: IntArray) -> None:
        """Read a request's tokens from here, an array that it keeps."""
        state.tokens = tokens
        self._table[state.place, loops.TOKENS_AT] = address(tokens)

    def leave(self, state: SuffixState) -> None:
        """The request has ended: its answer, as far as it was told of, joins the history of its scope."""
        self._states[state.place] = None
        answer = state.tokens[state.num_prompt : state.num_told].tolist()
        if answer:
            # Matches go on from where they were before.
            self.bring_up_to_date(state.history)
            state.history.add(answer)

    def bring_up_to_date(self, history: AnswerHistory) -> None:
        """Follow what is new in texts of this history's scope."""
        asked: list[int] = []
        for one in self._states:
            if one is not None and one.history is history:
                asked += (one.place, one.num_told, 0)
        if asked:
            self.continuations(asked, 0, min_prob=1.0)

    def continuations(
        self,
        asked: Sequence[int],
        wanted: int,
        *,
        min_prob: float,
        drafted: tuple[int, ...] = (),
    ) -> list[tuple[int, ...]]:
        """What several texts may go on with; see ``loops.continue_texts``. ``figures`` holds how they compare.

        Args:
            asked: per text its place, how many tokens are known and how many are wanted.
            wanted: the most of these.
            min_prob: of a chain.
            drafted: tokens that follow what is known.
        """
        num_rows = len(asked) // loops.ASKED
        if num_rows > self._num_rows or wanted > self._most_wanted:
            self._make_room(num_rows, wanted)
        rows = np.array(asked, dtype=np.int64)
        behind = np.array(drafted, dtype=np.int64) if drafted else _NOTHING
        while True:
            num_done = loops.continue_texts(
                self._table, rows, behind, self._factor, min_prob,
                self._found, self.figures, self._chains,
            )  # fmt: skip
            if num_done == num_rows:
                return pieces(self._found[: num_rows * (1 + wanted)], num_rows)
            place, known = asked[loops.ASKED * num_done : loops.ASKED * num_done + 2]
            state = self._states[place]
            assert state is not None
            state.own.make_room(2 * known)

    def _make_room(self, num_rows: int, wanted: int) -> None:
        """Room to continue so many texts by so many tokens each."""
        self._num_rows = num_rows = max(num_rows, self._num_rows)
        self._most_wanted = wanted = max(wanted, self._most_wanted)
        self._found = np.zeros(num_rows * (1 + wanted), dtype=np.int64)
        self._chains = np.zeros((2, wanted), dtype=np.int64)
        self.figures = np.zeros((num_rows, 2, 4))
