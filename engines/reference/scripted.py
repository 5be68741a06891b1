"""A deterministic engine whose logits are computable by hand.

A real implementation of the contract: it keeps the tokens of every slot instead of keys and
values, and asks a function for the logits that follow a prefix. Stricter than a device in what it
tells tests: padding columns are NaN, and a slot whose extend failed must be rebuilt from ``start``
0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from outrider.engines.base import EngineError, EngineLimits, FloatArray, Span
from outrider.engines.reference.token_slots import TokenSlots
from outrider.engines.trees import path_to


class ScriptedEngine(TokenSlots):
    """Engine over a function from a token prefix to the next token's logits.

    Args:
        logits_of: prefix -> [V] float32; called once per wanted position, never with no token.
        limits: capacities; V is ``limits.vocab_size``.
        failing_extends: 0-based numbers of the extends that raise EngineError and lose the slots
            they were given.

    Attributes:
        num_extends: begun so far, failed ones included.
    """

    # A row's logits are a function of its own tokens alone.
    is_row_invariant = True

    def __init__(
        self,
        logits_of: Callable[[tuple[int, ...]], FloatArray],
        limits: EngineLimits,
        *,
        failing_extends: Collection[int] = (),
    ) -> None:
        super().__init__(limits)
        self._logits_of = logits_of
        self._failing_extends = frozenset(failing_extends)
        self.num_extends = 0
        self._is_closed = False

    def fail_at(self, *numbers: int) -> None:
        """Make the extends with these 0-based numbers raise, besides those named before."""
        self._failing_extends |= frozenset(numbers)

    def tokens_of(self, slot: int) -> tuple[int, ...]:
        """Tokens a slot holds."""
        return self._slots[slot]

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32, R the greatest ``num_logits``; padding columns are NaN.

        Raises:
            EngineError: a span breaks a limit, this extend is scripted to fail, or the engine is
                closed.
        """
        if self._is_closed:
            raise EngineError("extend on a closed engine")
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
            first = len(span.tokens) - span.num_logits
            for column in range(span.num_logits):
                logits[row, column] = self._logits_of(text + _chain_to(first + column, span))
        return logits

    def close(self) -> None:
        """Forget all slots; a later extend raises EngineError."""
        self._slots = [()] * self.limits.max_batch
        self._is_closed = True


def _chain_to(index: int, span: Span) -> tuple[int, ...]:
    """Tokens of the span that token ``index`` sees, itself included."""
    if span.parents is None:
        return span.tokens[: index + 1]
    return tuple(span.tokens[node] for node in path_to(index, span.parents))
