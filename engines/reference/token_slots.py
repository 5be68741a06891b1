"""Slots of engines that keep the tokens themselves instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import (
    EngineError,
    EngineLimits,
    FloatArray,
    SlotState,
    Source,
    Span,
)
from outrider.engines.spans import (
    NO_STATES,
    check_have_sources,
    check_kept_path,
    check_move,
    check_open,
    check_read,
    check_share,
    check_sources,
    check_spans,
    check_state_read,
    check_state_write,
    check_write,
    floor_behind,
    floor_without_state,
    num_valid,
)


class TokenSlots:
    """Tokens and source of every slot, and of which slot's last span was a tree: a base of engines.

    Args:
        limits: capacities.
        source_vocab_size: of the sources' tokens; None for that of the logits.
    """

    packs_rows = False
    # A token's id, in place of its keys and values.
    token_bytes = 4

    def __init__(self, limits: EngineLimits, source_vocab_size: int | None = None) -> None:
        self.limits = limits
        # Its settled length, in place of a state.
        self.state_bytes = 0 if limits.max_open is None else 4
        self._source_vocab_size = source_vocab_size or limits.vocab_size
        self._slots: list[tuple[int, ...]] = [()] * limits.max_batch
        # Of a slot without a source empty: no source is.
        self._sources: list[tuple[int, ...]] = [()] * limits.max_batch
        self._trees: dict[int, Span] = {}
        # Settled tokens of each slot, where the limits say how many more there may be.
        self._floors = [0] * limits.max_batch

    def read(self, sources: Sequence[Source]) -> None:
        """Keep sources; see ``Engine.read``.

        Raises:
            EngineError: the model has no encoder, or a source breaks a limit.
        """
        check_sources(sources, self.limits, self._source_vocab_size)
        for source in sources:
            self._restart(source.slot, source.tokens)

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Copy a slot's source to other slots; see ``Engine.share_source``.

        Raises:
            EngineError: a slot is outside the engine, or this one has no source.
        """
        check_share(slot, destinations, [len(source) for source in self._sources])
        for destination in destinations:
            self._restart(destination, self._sources[slot])

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the slot's last span, a tree; see ``Engine.keep_path``.

        Raises:
            EngineError: there is no such path.
        """
        tree = check_kept_path(path, slot, self._trees.get(slot))
        del self._trees[slot]
        kept = tuple(tree.tokens[node] for node in path)
        self._slots[slot] = self._slots[slot][: tree.start] + kept

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the source and the first ``length`` tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens.
        """
        floor = self._floors[source] if length else 0
        check_move(source, destination, length, [len(held) for held in self._slots], floor)
        text = self._slots[source][:length]
        self._restart(destination, self._sources[source])
        self._slots[destination] = text
        self._floors[destination] = floor

    def first_start(self, slot: int) -> int:
        """Return the settled tokens of a slot; see ``Engine.first_start``."""
        return self._floors[slot]

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Return [end - start, 1] float32: the tokens' ids.

        Raises:
            EngineError: a slot is outside the engine, or holds fewer tokens.
        """
        check_read(slot, start, end, [len(held) for held in self._slots])
        return np.array(self._slots[slot][start:end], dtype=np.float32)[:, None]

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Put tokens behind the first ``start`` of a slot.

        Raises:
            EngineError: a slot is outside the engine, has no room or holds fewer tokens, or these are no tokens' ids.
        """
        check_write(slot, start, values, (1, 1), self.limits, [len(held) for held in self._slots])
        self._slots[slot] = self._slots[slot][:start] + tuple(values[:, 0].astype(int).tolist())
        self._trees.pop(slot, None)
        if self.state_bytes:
            self._floors[slot] = floor_without_state(self.limits)

    def read_state(self, slot: int) -> SlotState:
        """Return the number of settled tokens.

        Raises:
            EngineError: the slot has settled nothing, or this engine keeps no states.
        """
        if not self.state_bytes:
            raise EngineError(NO_STATES)
        check_state_read(slot, [len(held) for held in self._slots], self._floors)
        length = self._floors[slot]
        return SlotState(length=length, values=np.array([length], dtype=np.float32))

    def write_state(self, slot: int, state: SlotState) -> None:
        """Let a slot go on behind the text that was written.

        Raises:
            EngineError: the state is of another text, or this engine keeps none.
        """
        if not self.state_bytes:
            raise EngineError(NO_STATES)
        held = [len(held) for held in self._slots], self._floors
        check_state_write(slot, state, 1, self.limits, held)
        if state.values[0] != state.length:
            raise EngineError(
                f"slot {slot}: a state of {state.values[0]} tokens, not {state.length}"
            )
        self._floors[slot] = state.length

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Cut every slot to its length; of one without a length the source goes too."""
        cuts = (*lengths, *[None] * (len(self._slots) - len(lengths)))
        for slot, cut in enumerate(cuts[: len(self._slots)]):
            if (cut or 0) < self._floors[slot]:
                cut, self._floors[slot] = 0 if cut is not None else None, 0
            self._slots[slot] = self._slots[slot][: cut or 0]
            if cut is None:
                self._sources[slot] = ()

    def _restart(self, slot: int, source: tuple[int, ...]) -> None:
        """Give a slot a source and an empty text."""
        self._sources[slot] = source
        self._slots[slot], self._floors[slot] = (), 0
        self._trees.pop(slot, None)

    def _num_wanted(self, spans: Sequence[Span]) -> int:
        """Greatest ``num_logits`` of spans that keep the limits; EngineError for any other."""
        wanted = check_spans(spans, self.limits, [len(held) for held in self._slots])[1]
        if self.limits.max_source:
            check_have_sources(spans, [len(source) for source in self._sources])
        if self.limits.max_open is not None:
            check_open(spans, self.limits.max_open, self._floors)
        return wanted

    def _append(self, span: Span) -> tuple[int, ...]:
        """Put a span into its slot; the slot's tokens, every token of a tree among them."""
        held = self._slots[span.slot][: span.start] + span.tokens
        if self.limits.max_open is not None:
            self._floors[span.slot] = floor_behind(span, self._floors[span.slot])
        self._slots[span.slot] = held[: num_valid(span)]
        self._trees.pop(span.slot, None)
        if span.parents is not None:
            self._trees[span.slot] = span
        return held
