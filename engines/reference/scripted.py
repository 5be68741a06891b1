"""A deterministic engine whose logits are computable by hand.

A real implementation of the contract: it keeps the tokens of every slot instead of keys and
values, and asks a function for the logits that follow a prefix. Stricter than a device in what it
tells tests: padding columns are NaN, and a slot whose extend failed must be rebuilt from ``start``
0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from outrider.engines.base import EngineError, EngineLimits, FloatArray, Source, Span
from outrider.engines.reference.token_slots import TokenSlots
from outrider.engines.trees import path_to


class ScriptedEngine(TokenSlots):
    """Engine over a function from a token prefix to the next token's logits.

    Args:
        logits_of: prefix -> [V] float32, or source, prefix -> [V] float32 where ``limits.max_source`` is not 0;
            called once per wanted position, never with no token.
        limits: capacities; V is ``limits.vocab_size``.
        failing_extends: 0-based numbers of the extends that raise EngineError and lose the texts of
            the slots they were given.
        source_vocab_size: of the sources' tokens; None for V.

    Attributes:
        num_extends: begun so far, failed ones included.
        num_reads: likewise.
    """

    # A row's logits are a function of its own tokens alone.
    is_row_invariant = True

    def __init__(
        self,
        logits_of: Callable[..., FloatArray],
        limits: EngineLimits,
        *,
        failing_extends: Collection[int] = (),
        source_vocab_size: int | None = None,
    ) -> None:
        super().__init__(limits, source_vocab_size)
        self._logits_of = logits_of
        self._failing_extends = frozenset(failing_extends)
        self._failing_reads: frozenset[int] = frozenset()
        self.num_extends = self.num_reads = 0
        self._is_closed = False

    def fail_at(self, *numbers: int) -> None:
        """Make the extends with these 0-based numbers raise, besides those named before."""
        self._failing_extends |= frozenset(numbers)

    def fail_reads_at(self, *numbers: int) -> None:
        """Make the reads with these 0-based numbers raise; the slots they were given lose source and text."""
        self._failing_reads |= frozenset(numbers)

    def tokens_of(self, slot: int) -> tuple[int, ...]:
        """Tokens a slot holds."""
        return self._slots[slot]

    def source_of(self, slot: int) -> tuple[int, ...]:
        """Source of a slot, empty where it has none."""
        return self._sources[slot]

    def read(self, sources: Sequence[Source]) -> None:
        """Keep sources; see ``Engine.read``.

        Raises:
            EngineError: a source breaks a limit, this read is scripted to fail, or the engine is
                closed.
        """
        self._require_open()
        super().read(sources)
        number = self.num_reads
        self.num_reads += 1
        if number in self._failing_reads:
            for source in sources:
                self._restart(source.slot, ())
            raise EngineError(f"scripted failure of read {number}")

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32, R the greatest ``num_logits``; padding columns are NaN.

        Raises:
            EngineError: a span breaks a limit, this extend is scripted to fail, or the engine is
                closed.
        """
        self._require_open()
        num_wanted = self._num_wanted(spans)
        number = self.num_extends
        self.num_extends += 1
        if number in self._failing_extends:
            for span in spans:
                self._slots[span.slot] = ()
            raise EngineError(f"scripted failure of extend {number}")
        shape = (len(spans), num_wanted, self.limits.vocab_size)
        logits = np.full(shape, np.nan, dtype=np.float32)
        for row, span in enumerate(spans):
            text = self._append(span)[: span.start]
            given = (self._sources[span.slot],) if self.limits.max_source else ()
            first = len(span.tokens) - span.num_logits
            for column in range(span.num_logits):
                logits[row, column] = self._logits_of(
                    *given, text + _chain_to(first + column, span)
                )
        return logits

    def close(self) -> None:
        """Forget all slots; a later extend raises EngineError."""
        self._slots = [()] * self.limits.max_batch
        self._sources = [()] * self.limits.max_batch
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("this engine is closed")


def _chain_to(index: int, span: Span) -> tuple[int, ...]:
    """Tokens of the span that token ``index`` sees, itself included."""
    if span.parents is None:
        return span.tokens[: index + 1]
    return tuple(span.tokens[node] for node in path_to(index, span.parents))
