"""N-gram models: what usually follows the last tokens, from a corpus and from the request so far.

Drafts are point masses: the likeliest token of the longest known context, one after another, as
long as the product of their shares stays above a threshold. Counts of the request come before the
corpus at equal length; a shorter context discounts the share by 0.4.

Source: "stupid back-off", Brants et al. 2007; unigram and bigram drafts: Leviathan et al. 2023
(arXiv:2211.17192), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.drafters.base import DrafterCapabilities, DrafterParts, DraftRow, Need
from outrider.runtime.drafters.chain import ChainDrafter
from outrider.runtime.drafters.text.suffix_array import Datastore

BACK_OFF = 0.4
MAX_CORPUS_ORDER = 3
"""Longest n-gram of a corpus: three ids of up to 21 bits make one 64-bit key."""


@dataclass(slots=True)
class Counts:
    """Counts of what followed one context, and their greatest.

    Attributes:
        best: token of the greatest count, ties by lower id.
    """

    by_token: dict[int, int] = field(default_factory=dict)
    total: int = 0
    best: int = 0

    def add(self, token: int) -> None:
        """Count one continuation."""
        count = self.by_token.get(token, 0) + 1
        greatest = self.by_token.get(self.best, 0)
        self.by_token[token] = count
        self.total += 1
        if count > greatest or (count == greatest and token < self.best):
            self.best = token


class NgramTable:
    """Counts of a growing text, for contexts of 0 to order - 1 tokens.

    Args:
        order: longest n-gram counted.
        max_contexts: contexts held; beyond them only known ones are counted further.
    """

    def __init__(self, order: int, max_contexts: int) -> None:
        self.order = order
        self._max_contexts = max_contexts
        self._counts: dict[tuple[int, ...], Counts] = {}
        self.suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of contexts held."""
        return len(self._counts)

    def push(self, tokens: list[int]) -> None:
        """Count tokens that continue the text."""
        for token in tokens:
            for length in range(len(self.suffix) + 1):
                context = self.suffix[len(self.suffix) - length :]
                counts = self._counts.get(context)
                if counts is None:
                    if len(self._counts) >= self._max_contexts:
                        continue
                    counts = self._counts[context] = Counts()
                counts.add(token)
            if self.order > 1:
                self.suffix = (*self.suffix, token)[1 - self.order :]

    def best(self, context: tuple[int, ...]) -> tuple[int, float] | None:
        """Return the likeliest continuation of exactly this context and its share; None if unseen."""
        counts = self._counts.get(context)
        return (
            None if counts is None else (counts.best, counts.by_token[counts.best] / counts.total)
        )


class CorpusTable:
    """The likeliest continuation of every context of a corpus, in sorted arrays."""

    def __init__(self, tokens: IntArray, *, order: int, vocab_size: int) -> None:
        self._bits = vocab_size.bit_length()
        self._levels = [
            self._count(tokens, length, vocab_size)
            for length in range(min(order, MAX_CORPUS_ORDER))
        ]

    def best(self, context: tuple[int, ...]) -> tuple[int, float] | None:
        """Return the likeliest continuation of exactly this context and its share; None if unseen."""
        if len(context) >= len(self._levels):
            return None
        keys, best, share = self._levels[len(context)]
        key = 0
        for token in context:
            key = (key << self._bits) | token
        index = int(np.searchsorted(keys, key))
        if index == len(keys) or keys[index] != key:
            return None
        return int(best[index]), float(share[index])

    def _count(
        self, tokens: IntArray, length: int, vocab_size: int
    ) -> tuple[IntArray, IntArray, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Return contexts of one length as keys [C] int64 ascending, best token and its share per key."""
        num = max(len(tokens) - length, 0)
        columns = [tokens[start : start + num] for start in range(length + 1)]
        # Separators are V: no n-gram crosses from one text to the next.
        whole = np.all([column < vocab_size for column in columns], axis=0)
        grams = np.zeros(int(whole.sum()), dtype=np.int64)
        for column in columns:
            grams = (grams << self._bits) | column[whole]
        distinct, counts = np.unique(grams, return_counts=True)
        contexts, following = distinct >> self._bits, distinct & ((1 << self._bits) - 1)
        order = np.lexsort((following, -counts, contexts))
        keys, first, inverse = np.unique(contexts[order], return_index=True, return_inverse=True)
        totals = np.bincount(inverse, weights=counts[order], minlength=len(keys))
        return keys, following[order][first], counts[order][first] / np.maximum(totals, 1.0)


class NgramDrafter(ChainDrafter[NgramTable]):
    """Proposes the likeliest continuations by counts, backing off to shorter contexts.

    Attributes:
        fixed_order: of a baseline, which drafts without a threshold; None takes the server's order.
    """

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(is_guesser=True)
    fixed_order: ClassVar[int | None] = None

    def __init__(
        self,
        *,
        order: int,
        min_prob: float,
        max_contexts: int = 65_536,
        corpus: CorpusTable | None = None,
    ) -> None:
        super().__init__()
        self._order = order
        self._min_prob = min_prob
        self._max_contexts = max_contexts
        self._corpus = corpus

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Build it with the server's order, threshold and, where there is one, its corpus."""
        config, corpus = parts.config, None
        order = cls.fixed_order or config.ngram_order
        if parts.has(Need.CORPUS):
            store = Datastore.open(Path(config.datastore), vocab_size=parts.vocab_size)
            tokens = store.tokens.astype(np.int64)
            corpus = CorpusTable(tokens, order=order, vocab_size=parts.vocab_size)
        return cls(
            order=order,
            min_prob=0.0 if cls.fixed_order else config.min_prob,
            max_contexts=config.max_ngrams,
            corpus=corpus,
        )

    def new_state(self, row: DraftRow) -> NgramTable:
        """Return an empty table."""
        return NgramTable(self._order, self._max_contexts)

    def push(self, state: NgramTable, tokens: list[int]) -> None:
        """Count committed tokens."""
        state.push(tokens)

    def end_text(self, state: NgramTable) -> None:
        """Keep the counts alone."""
        state.suffix = ()

    def extend(self, state: NgramTable, drafted: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return the likeliest tokens one after another, while their share is high enough."""
        width = self._order - 1
        context = (*state.suffix, *drafted)[-width:] if width else ()
        chain: list[int] = []
        prob = 1.0
        while len(chain) < length:
            found = self._best(state, context)
            if found is None or prob * found[1] < self._min_prob:
                break
            prob *= found[1]
            chain.append(found[0])
            context = (*context, found[0])[-width:] if width else ()
        return tuple(chain)

    def _best(self, state: NgramTable, context: tuple[int, ...]) -> tuple[int, float] | None:
        """Return the best continuation of the longest known end of a context, its share discounted."""
        discount = 1.0
        for start in range(len(context) + 1):
            found = state.best(context[start:])
            if found is None and self._corpus is not None:
                found = self._corpus.best(context[start:])
            if found is not None:
                return found[0], found[1] * discount
            discount *= BACK_OFF
        return None


class UnigramDrafter(NgramDrafter):
    """Proposes the most frequent token, always: the paper's baseline."""

    fixed_order = 1


class BigramDrafter(NgramDrafter):
    """Proposes what most often followed the last token, always: the paper's baseline."""

    fixed_order = 2
