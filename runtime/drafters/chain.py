"""Base of drafters of point-mass chains: a state per request, fed with each committed token once.

A subclass defines its state, how tokens enter it and how it continues a context. Catching up, cutting at end tokens and
forgetting are here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Generic, Self, TypeVar

from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Guesser,
    Outcome,
)

S = TypeVar("S")

DEFAULTS = DraftingConfig()


class ChainDrafter(ABC, Generic[S]):
    """Base of drafters without a model; a ``Guesser`` as well."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(is_guesser=True)

    def __init__(self, config: DraftingConfig = DEFAULTS) -> None:
        self._config = config
        self._states: dict[str, S] = {}
        self._num_seen: dict[str, int] = {}

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build it with the server's settings."""
        return cls(parts.config)

    @abstractmethod
    def new_state(self, row: DraftRow) -> S:
        """Return the state of a request that is seen for the first time."""

    @abstractmethod
    def push(self, state: S, tokens: list[int]) -> None:
        """Take in committed tokens: the prompt first, then the output as it grows."""

    def end_text(self, state: S) -> None:
        """Note that what is pushed next is another text: the source before was the first, and no n-gram crosses."""

    @abstractmethod
    def extend(self, state: S, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return at most ``length`` >= 1 tokens that may follow the committed tokens and ``drafted``."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Propose a draft per chosen slot."""
        return [self.draft(live[slot]) for slot in chosen]

    def draft(self, row: DraftRow) -> Draft:
        """Return a row's draft: a chain, unless a subclass makes trees."""
        return self.chain(row)

    def chain(self, row: DraftRow) -> Draft:
        """Return what is guessed of a row, cut after its first end token."""
        return guessed_chain(self, row)

    def guess(self, row: DraftRow, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Continue the committed tokens and ``drafted``; see ``Guesser``."""
        return self.extend(self.state_of(row), drafted, length)

    def state_of(self, row: DraftRow) -> S:
        """Return the row's state, up to date with its committed tokens."""
        key, text = row.key, row.text
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = self.new_state(row)
            self._num_seen[key] = 0
            if len(source := row.quoted):
                self.push(state, source.tolist())
                self.end_text(state)
                self._num_seen[key] = len(source) + 1
        num_seen = self._num_seen[key]
        if num_seen < len(text):
            self._num_seen[key] = len(text)
            self.push(state, text[num_seen:].tolist())
        return state

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from judged drafts; nothing, unless a subclass does."""

    def forget(self, key: str) -> None:
        """Drop the request's state."""
        self._states.pop(key, None)
        self._num_seen.pop(key, None)


def guessed_chain(guesser: Guesser, row: DraftRow) -> Draft:
    """Return what a guesser continues a row with, cut after its first end token."""
    tokens = guesser.guess(row, (), row.gamma)
    return Draft(tokens=cut_at_end(tokens, row.sampling.params.end_token_ids))


def cut_at_end(tokens: tuple[int, ...], end_token_ids: Collection[int]) -> tuple[int, ...]:
    """Return tokens up to and with the first end token."""
    for end in end_token_ids:
        if end in tokens:
            tokens = tokens[: tokens.index(end) + 1]
    return tokens
