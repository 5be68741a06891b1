"""A head as an engine: it drafts from what its target computed of each token, its features, beside the token itself.

Token t of a text is read together with the features of token t - 1, so the text's first token is read by nobody: the
head within holds token t at place t - 1. Of settled tokens the features are the target's, which keeps them in its slot
of the same number. Behind them, where the target has computed nothing yet, the head reads what it answered itself for
the token before: drafted tokens are fed one at a time. What it wrote for those is made of its own features, and is to
be fed again once they are settled (``EngineLimits.reads_features``).

Whatever it reads, drafts are judged as any others: a missing feature is zeros.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from outrider.engines.base import Engine, EngineError, FloatArray, Source, Span
from outrider.engines.spans import NO_ENCODER, WrappedEngine


class Featured(Protocol):
    """A target that keeps features."""

    def features(self, slot: int, start: int, end: int) -> FloatArray:
        """Return [end - start, F] float32, features of a slot's tokens; zeros of those that it does not hold."""
        ...


class Recycling(Engine, Protocol):
    """A head's graph: an engine whose spans have features."""

    def recycled(self, slot: int) -> FloatArray:
        """Return [F] float32, what stands for the features of the last token of the slot's last span."""
        ...


@dataclass(slots=True)
class HeadEngine(WrappedEngine):
    """A head that reads the features of a target's slots.

    Attributes:
        engine: the head's graph.
        target: which it drafts for.
    """

    engine: Recycling
    target: Featured

    @property
    def token_bytes(self) -> int:
        """Return 0: a text's features are kept with the target's slots, and reading it again costs one layer."""
        return 0

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans; see ``Engine.extend``. Of several tokens that are not settled, all but the first read zeros.

        Raises:
            EngineError: as the head's graph, or the logits behind a text's first token are wanted beside others.
        """
        return self.engine.extend([self._paired(span) for span in spans])

    def read(self, sources: Sequence[Source]) -> None:
        """Refuse; see ``Engine.read``."""
        raise EngineError(NO_ENCODER)

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Refuse; see ``Engine.share_source``."""
        raise EngineError(NO_ENCODER)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy a slot's text over another's."""
        self.engine.move_slot(source, destination, max(length - 1, 0))

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first tokens of each slot; see ``Engine.trim``."""
        self.engine.trim([length and length - 1 for length in lengths])

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Refuse; see ``token_bytes``."""
        raise EngineError("slots of a head are not read")

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Refuse; see ``token_bytes``."""
        raise EngineError("slots of a head are not written")

    def _paired(self, span: Span) -> Span:
        """Return a span as the head's graph reads it, at the places and with the features of the tokens before."""
        # A text of one token has no pair: a head that must draft behind it reads it beside zeros.
        first = max(span.start, int(len(span.tokens) > 1))
        tokens = span.tokens[first - span.start :]
        settled = max(0, span.start + span.num_settled - first) if first else 0
        features = np.zeros((len(tokens), self.limits.reads_features), np.float32)
        if settled:
            features[:settled] = self.target.features(span.slot, first - 1, first - 1 + settled)
        elif first and tokens:
            features[0] = self.engine.recycled(span.slot)
        return replace(span, start=max(first - 1, 0), tokens=tokens, features=features)
