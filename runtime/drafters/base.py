"""The drafter contract: rows of a batch in, short drafts out.

A drafter may propose anything: the verification keeps the answer's law whatever the draft. What it
must say truthfully is whether each token was drawn from a law the sampler kept, or is a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.base import Engine
from engines.laws import Sampler, SamplingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """A live row as a drafter sees it.

    Attributes:
        sampling: committed tokens, law and seed; ``draft_tokens`` is empty.
        gamma: tokens wanted at most; 0 for rows that take no part.
        num_computed: leading tokens valid in the draft model's cache.
    """

    sampling: SamplingRow
    gamma: int
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a drafter proposes for one row.

    Attributes:
        tokens: at most gamma ids, an end token only in last place; empty is plain decoding.
        is_sampled: whether the sampler keeps the law each token was drawn from.
        num_computed: leading tokens now valid in the draft model's cache; None when untouched.
    """

    tokens: tuple[int, ...]
    is_sampled: bool = False
    num_computed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """What drafters may be built from.

    Attributes:
        draft: the draft model's engine, if the bundle has one.
        sampler: draws draft tokens.
        vocab_size: the target's V; nothing at or beyond it is proposed.
        chunk: tokens fed to one lagging row in one step.
        min_ngram: shortest suffix to look up.
        max_ngram: longest suffix to look up.
    """

    draft: Engine | None
    sampler: Sampler
    vocab_size: int
    chunk: int
    min_ngram: int
    max_ngram: int


class Drafter(Protocol):
    """One way to propose drafts."""

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Draft for some of the live rows.

        Args:
            live: every live row, row i holding slot i.
            chosen: slots to draft for, ascending; their gamma is at least 1.

        Returns:
            One draft per chosen slot.

        Raises:
            EngineError: the draft model failed; its caches of all live slots are undefined.
        """
        ...
