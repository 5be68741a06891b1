"""The draft model reads the end of a long prompt alone.

A draft is verified whatever it was made from, so a draft model need not read all of a prompt: reading costs a third of
what the target's does, and a short answer behind a long prompt would never earn it back. Which tokens are left out is
known to the engine's slots alone. To everybody else they count as computed, at the places that they have in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.engines.base import EngineError, FloatArray, SlotState, Source, Span
from outrider.engines.spans import WrappedEngine


@dataclass(slots=True)
class PromptEndEngine(WrappedEngine):
    """A draft model's engine whose slots may hold a text without its first tokens.

    The engine within sees each text from the first token that was not left out, at position 0.

    Attributes:
        left_out: by slot, leading tokens that it does not hold.
    """

    left_out: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Leave nothing out."""
        self.left_out = [0] * self.engine.limits.max_batch

    def leave_out(self, slot: int, num_tokens: int) -> None:
        """Let a slot's text begin behind so many tokens; what it held is forgotten."""
        self.left_out[slot] = num_tokens

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources; nothing is left out of the texts behind them."""
        self.engine.read(sources)
        for source in sources:
            self.left_out[source.slot] = 0

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Copy a slot's source; nothing is left out of the texts behind it."""
        self.engine.share_source(slot, destinations)
        for destination in destinations:
            self.left_out[destination] = 0

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans; a text begins where one starts that lies within what was left out, at 0 for the whole text."""
        for span in spans:
            self._begin(span.slot, span.start)
        return self.engine.extend([self._moved(span) for span in spans])

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy a slot's text over another's, without what was left out of it."""
        self.engine.move_slot(source, destination, self._held(source, length))
        self.left_out[destination] = self.left_out[source]
        self._begin(destination, length)

    def first_start(self, slot: int) -> int:
        """Return the least start but 0 that a slot takes; see ``Engine.first_start``."""
        floor = self.engine.first_start(slot)
        return self.left_out[slot] + floor if floor else 0

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Return what is cached of a slot's tokens.

        Raises:
            EngineError: as the engine, or some of them were left out.
        """
        if left_out := self.left_out[slot]:
            raise EngineError(f"slot {slot}: its first {left_out} tokens were left out")
        return self.engine.read_slot(slot, start, end)

    def read_state(self, slot: int) -> SlotState:
        """Return a copy of a slot's state.

        Raises:
            EngineError: as the engine, or some tokens were left out.
        """
        if left_out := self.left_out[slot]:
            raise EngineError(f"slot {slot}: its first {left_out} tokens were left out")
        return self.engine.read_state(slot)

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Put tokens that were read from a slot into one; see ``Engine.write_slot``."""
        self._begin(slot, start)
        self.engine.write_slot(slot, self._held(slot, start), values)

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first tokens of each slot; see ``Engine.trim``."""
        self.engine.trim(
            [
                None if length is None else self._held(slot, length)
                for slot, length in enumerate(lengths)
            ]
        )

    def _begin(self, slot: int, start: int) -> None:
        self.left_out[slot] = min(self.left_out[slot], start)

    def _moved(self, span: Span) -> Span:
        start = self._held(span.slot, span.start)
        return span if start == span.start else replace(span, start=start)

    def _held(self, slot: int, length: int) -> int:
        """Return how many of a text's first tokens the engine holds."""
        return max(0, length - self.left_out[slot])
