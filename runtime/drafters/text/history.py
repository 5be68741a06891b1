"""Earlier answers of one scope, searchable, within a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outrider.runtime.drafters.text.automaton import ROOT, SuffixAutomaton


class AnswerHistory:
    """Earlier answers as one automaton; the oldest answer goes first.

    Removed answers leave states without occurrences behind. When these outweigh the others, the automaton is built
    anew.

    Args:
        max_tokens: tokens of all answers together.
    """

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self._max_tokens = max_tokens
        self._answers: deque[Sequence[int]] = deque()
        self._num_tokens = 0
        self._num_removed = 0

    def __len__(self) -> int:
        """Return the number of tokens held."""
        return self._num_tokens

    def add(self, answer: Sequence[int]) -> None:
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

    def _remove(self, answer: Sequence[int]) -> None:
        self.automaton.remove(answer)
        self._num_tokens -= len(answer)
        self._num_removed += len(answer)
