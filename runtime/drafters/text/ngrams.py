"""Unigram and bigram models of a corpus, which draft as a draft model does: tokens are drawn from their distribution.

Their counts are those of the datastore's suffix array, so a corpus needs no further training. The engine over them has
no cache: a row of probabilities depends on the last token alone, and a request's rows in the draft model's cache stay
as they are.

Source: Leviathan et al. 2023, sections 3.6 and 4.1, "n-gram models" as approximation models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from outrider.engines.base import EngineError, EngineLimits, FloatArray, IntArray, Source, Span
from outrider.engines.spans import WithoutCopies
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Need,
    Outcome,
)
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.text.suffix_array import Datastore

Probs = npt.NDArray[np.float64]

NUM_SUCCESSORS = 64
"""Most frequent tokens behind a token that a bigram's row has; the others have what the unigram's row gives them."""
UNIGRAM_SHARE = 0.1
"""Of a bigram's row that is the unigram's."""
UNSEEN_SHARE = 0.001
"""Of a unigram's row that all tokens of the vocabulary have in equal parts, so that none is impossible."""
MAX_ROWS_KEPT = 4096
"""Tokens whose successors are kept, 1 KiB each; counting those of a frequent one takes milliseconds."""


class NgramEngine(WithoutCopies):
    """An engine whose rows are the log-probabilities of a corpus's next token.

    Args:
        store: corpus; V is its ``vocab_size``.
        order: 1: rows depend on nothing; 2: on the token before.
    """

    is_row_invariant = True
    packs_rows = True

    def __init__(self, store: Datastore, order: int) -> None:
        most = sys.maxsize
        self.limits = EngineLimits(
            max_batch=most, max_context=most, max_extend=most, max_source=most, vocab_size=store.vocab_size
        )  # fmt: skip
        self._order = order
        self._unigram = unigram_probs(store)
        share = 1.0 if order == 1 else UNIGRAM_SHARE
        # What every row has but for the successors of its token.
        self._base = np.log(share * self._unigram).astype(np.float32)
        self._log_unigram = np.log(self._unigram).astype(np.float32)
        self._successors = lru_cache(maxsize=MAX_ROWS_KEPT)(
            lambda token: successor_log_probs(store, token, self._unigram)
        )

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Return [B, R, V] float32 log-probabilities behind the spans' last tokens, each row a sum of 1 in float64."""
        num_wanted = max(span.num_logits for span in spans)
        logits = np.empty((len(spans), num_wanted, self.limits.vocab_size), dtype=np.float32)
        for row, span in enumerate(spans):
            for column, token in enumerate(span.tokens[len(span.tokens) - span.num_logits :]):
                self._fill(logits[row, column], token)
        return logits

    def _fill(self, row: FloatArray, token: int) -> None:
        if self._order == 1:
            row[:] = self._base
            return
        ids, log_probs = self._successors(token)
        # A token that nothing follows says nothing.
        row[:] = self._base if len(ids) else self._log_unigram
        row[ids] = log_probs

    def read(self, sources: Sequence[Source]) -> None:
        """Do nothing: rows depend on no source."""

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Do nothing: rows depend on no source."""

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Refuse: this engine takes no trees."""
        raise EngineError("an n-gram model takes no trees")

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Do nothing: slots hold nothing."""

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Do nothing: slots hold nothing."""

    def close(self) -> None:
        """Do nothing: the corpus is mapped for as long as anything refers to it."""


def unigram_probs(store: Datastore) -> Probs:
    """Return [V] float64 relative frequencies of a corpus's tokens, none 0; they sum to 1."""
    counts = store.counts()
    frequencies = counts / max(1, counts.sum())
    probs = (1.0 - UNSEEN_SHARE) * frequencies + UNSEEN_SHARE / store.vocab_size
    total: Probs = probs / probs.sum()
    return total


def successor_log_probs(
    store: Datastore, token: int, unigram: Probs
) -> tuple[IntArray, FloatArray]:
    """Return a token's most frequent successors, ties by id, and their log-probabilities, [n <= 64] int64 and float32.

    Args:
        store: corpus.
        token: whose successors.
        unigram: [V] float64, sums to 1.
    """
    ids, counts = store.successors(token)
    best = np.argsort(-counts, kind="stable")[:NUM_SUCCESSORS]
    ids, counts = ids[best], counts[best]
    seen = counts / max(1, counts.sum())
    probs = (1.0 - UNIGRAM_SHARE) * seen + UNIGRAM_SHARE * unigram[ids]
    return ids, np.log(probs).astype(np.float32)


class UnigramDrafter:
    """Draws drafts from the frequencies of a corpus's tokens."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        needs=frozenset({Need.CORPUS, Need.HOST_SAMPLER}), is_sampled=True
    )
    order: ClassVar[int] = 1

    def __init__(self, parts: DrafterParts, store: Datastore) -> None:
        self._parts, self._store = parts, store

    @cached_property
    def engine(self) -> NgramEngine:
        """Return what drafts are drawn from: counted when first asked for, since every start with a corpus is here."""
        return NgramEngine(self._store, self.order)

    @cached_property
    def _model(self) -> ModelDrafter:
        return ModelDrafter(replace(self._parts, draft=self.engine))

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Open the server's datastore.

        Raises:
            BundleError: it cannot be read, or was made for another vocabulary.
        """
        store = Datastore.open(Path(parts.config.datastore), vocab_size=parts.vocab_size)
        return cls(parts, store)

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Draft as a draft model that has read all but the last token of every row."""
        rows = [replace(row, num_computed=len(row.sampling.history) - 1) for row in live]
        # The cache of the bundle's draft model, if it has one, stays as it is.
        return [replace(one, num_computed=None) for one in self._model.propose(rows, chosen)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn nothing: the corpus does not change."""

    def forget(self, key: str) -> None:
        """Keep nothing per request."""


class BigramDrafter(UnigramDrafter):
    """Draws drafts from what follows the last token in a corpus."""

    order: ClassVar[int] = 2
