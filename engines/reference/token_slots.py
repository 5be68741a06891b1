"""Slots of engines that keep the tokens themselves instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import EngineLimits, Span
from outrider.engines.spans import (
    WithoutSources,
    check_kept_path,
    check_move,
    check_spans,
    num_valid,
)


class TokenSlots(WithoutSources):
    """Tokens of every slot, and of which slot's last span was a tree: a base of engines."""

    packs_rows = False

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._slots: list[tuple[int, ...]] = [()] * limits.max_batch
        self._trees: dict[int, Span] = {}

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
        """Copy the first ``length`` tokens of one slot over another.

        Raises:
            EngineError: a slot is outside the engine, or the source holds fewer tokens.
        """
        check_move(source, destination, length, [len(held) for held in self._slots])
        self._slots[destination] = self._slots[source][:length]
        self._trees.pop(destination, None)

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Cut every slot to its length, to nothing where none is given."""
        cuts = (*lengths, *[0] * (len(self._slots) - len(lengths)))
        self._slots = [held[: cut or 0] for held, cut in zip(self._slots, cuts, strict=True)]

    def _num_wanted(self, spans: Sequence[Span]) -> int:
        """Greatest ``num_logits`` of spans that keep the limits; EngineError for any other."""
        return check_spans(spans, self.limits, [len(held) for held in self._slots])[1]

    def _append(self, span: Span) -> tuple[int, ...]:
        """Put a span into its slot; the slot's tokens, every token of a tree among them."""
        held = self._slots[span.slot][: span.start] + span.tokens
        self._slots[span.slot] = held[: num_valid(span)]
        self._trees.pop(span.slot, None)
        if span.parents is not None:
            self._trees[span.slot] = span
        return held
