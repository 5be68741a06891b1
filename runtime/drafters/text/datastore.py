"""Retrieval from a datastore: what most often followed the longest known end of the context.

The heaviest prefixes of the continuations make a tree, or where only chains are verified the
heaviest chain; an unknown context means no draft.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv:2311.08252).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import DrafterCapabilities, DrafterParts, DraftRow, Need
from outrider.runtime.drafters.branches import BranchingDrafter, Budget, grow
from outrider.runtime.drafters.text.suffix_array import Datastore

MAX_MATCHES = 64
"""Occurrences that vote on a continuation, spread evenly over all there are."""


class DatastoreDrafter(BranchingDrafter[list[int]]):
    """Proposes continuations found in a corpus; its state is the context's last tokens."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        needs=frozenset({Need.CORPUS}), is_guesser=True, proposes_trees=True
    )

    def __init__(self, config: DraftingConfig, store: Datastore) -> None:
        super().__init__(config)
        self._store = store
        self._max_match = config.datastore_max_match

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Open the server's datastore.

        Raises:
            BundleError: it cannot be read, or was made for another vocabulary.
        """
        store = Datastore.open(Path(parts.config.datastore), vocab_size=parts.vocab_size)
        return cls(parts.config, store)

    def new_state(self, row: DraftRow) -> list[int]:
        """Return no tokens."""
        return []

    def push(self, state: list[int], tokens: list[int]) -> None:
        """Keep the last tokens."""
        state += tokens
        del state[: -self._max_match]

    def end_text(self, state: list[int]) -> None:
        """Forget the source: the corpus alone is drafted from."""
        state.clear()

    def extend(self, state: list[int], drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return the heaviest continuation of the longest match."""
        return heaviest_chain(self._rows([*state, *drafted], length), self._store.vocab_size)

    def branch(
        self, state: list[int], budget: Budget, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a tree of the heaviest prefixes of what followed the longest match."""
        store, length = self._store, budget.max_depth

        def followers(
            place: tuple[int, list[list[int]]],
        ) -> list[tuple[int, float, tuple[int, list[list[int]]]]]:
            depth, rows = place
            if depth == length or not rows:
                return []
            counts = Counter(row[depth] for row in rows)
            # Where the corpus ends nothing is known to follow.
            del counts[store.vocab_size]
            return [
                (token, count / len(rows), (depth + 1, [r for r in rows if r[depth] == token]))
                for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            ]

        return grow((0, self._rows(state, length)), followers, budget, ends)

    def _rows(self, context: list[int], length: int) -> list[list[int]]:
        """Return the continuations of the context's longest known end; none for an unknown one."""
        size, found = self._store.longest_suffix(
            context[-self._max_match :],
            shortest=self._config.lookup_min_ngram,
            longest=self._max_match,
        )
        return continuations(self._store, found, size, length) if size else []


def continuations(store: Datastore, found: range, skip: int, length: int) -> list[list[int]]:
    """Return at most ``length`` tokens behind the first ``skip`` of each of ``MAX_MATCHES`` occurrences."""
    step = -(-len(found) // MAX_MATCHES)
    positions = store.suffixes[found.start : found.stop : step].astype(np.int64) + skip
    columns = positions[:, None] + np.arange(length)
    last = len(store.tokens) - 1
    # The last token is a separator: a continuation that runs over the end stops there.
    gathered: list[list[int]] = store.tokens[np.minimum(columns, last)].tolist()
    return gathered


def heaviest_chain(rows: list[list[int]], separator: int) -> tuple[int, ...]:
    """Return at each depth the most frequent next token among the rows that agree so far, ties by id."""
    chain: list[int] = []
    while rows and len(chain) < len(rows[0]):
        depth = len(chain)
        if len(rows) == 1:
            token = rows[0][depth]
        else:
            counts = Counter(row[depth] for row in rows)
            greatest = max(counts.values())
            token = min(t for t, count in counts.items() if count == greatest)
            rows = [row for row in rows if row[depth] == token]
        if token == separator:
            break
        chain.append(token)
    return tuple(chain)
