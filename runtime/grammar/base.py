"""What a constraint tells the loop: which tokens may follow, and which must.

The contract alone; ``runtime.grammar`` implements it over grammars. A constraint is a function of the tokens that were
committed: whatever was asked in between, it says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.engines.sampling.base import IntArray32
from outrider.runtime.core.params import GrammarParams

MOST_FORCED = 64
"""Tokens that a constraint may force behind one judged token; the rest of a longer run is forced behind the next."""


class Constraint(Protocol):
    """The constraint of one answer, on the worker's thread.

    Masks are rows of bits over the target's vocabulary, as ``SamplingRow.masks`` has them. Behind an end token, and
    behind a token that the constraint does not allow, nothing is masked: no sampler draws there.
    """

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of tokens of the answer, none of them an end token.

        Raises:
            RequestError: they break the constraint, or it became too complex to go on.
        """
        ...

    def forced(self, most: int) -> tuple[int, ...]:
        """Return the tokens behind the committed ones that the constraint leaves no choice about, at most ``most``.

        An end token stands in the last place only. The masks at these places have one bit each.
        """
        ...

    def fits(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens the constraint allows behind the committed ones; an end token is the last."""
        ...

    def masks(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> IntArray32:
        """Return the masks of a draft, [1 + len(tokens), words] int32, valid until the constraint is asked again.

        Args:
            tokens: of the draft, behind the committed ones.
            parents: None for a chain; of a tree as in ``SamplingRow.parents``, and row n is node n's.
        """
        ...

    def begin(self, num_tokens: int) -> IntArray32:
        """Return masks of a draft that is yet to be made, [at least 1 + num_tokens, words] int32.

        Row 0 is there; ``follow`` fills the others in place, until ``masks``, ``fits`` or ``commit`` are called.
        """
        ...

    def follow(self, tokens: Sequence[int]) -> IntArray32:
        """Return the mask behind a draft's tokens, [words] int32, row ``len(tokens)`` of what ``begin`` gave."""
        ...


class Constraints(Protocol):
    """Makes constraints for the requests of one model; callable from any thread."""

    def is_kept(self, params: GrammarParams) -> bool:
        """Return whether a grammar need not be compiled again."""
        ...

    def constraint(self, params: GrammarParams) -> Constraint:
        """Return the constraint of an answer that has not begun.

        Raises:
            RequestError: the grammar cannot be read; names its field.
        """
        ...
