"""Bases of engines, and checks of a list of spans, made by every backend before it computes anything.

A span that breaks a limit is a bug of the caller, not of the backend; refusing it before the first
write keeps the caches of all slots as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.base import (
    Engine,
    EngineError,
    EngineLimits,
    FloatArray,
    SlotState,
    Source,
    Span,
)
from outrider.engines.trees import chain_length, check_parents, check_path, tree_layout

NO_ENCODER = "this model has no encoder: it reads no sources"
NO_STATES = "this model has no recurrent layers: its slots keep no states"


class WithoutStates:
    """A base of engines whose slots are truncated anywhere."""

    state_bytes = 0

    def first_start(self, slot: int) -> int:
        """Return 0: any start is taken; see ``Engine.first_start``."""
        return 0

    def read_state(self, slot: int) -> SlotState:
        """Refuse; see ``Engine.read_state``."""
        raise EngineError(NO_STATES)

    def write_state(self, slot: int, state: SlotState) -> None:
        """Refuse; see ``Engine.write_state``."""
        raise EngineError(NO_STATES)


class WithoutCopies(WithoutStates):
    """A base of engines whose slots are neither read nor written, and keep no states."""

    token_bytes = 0

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Refuse; see ``Engine.read_slot``."""
        raise EngineError("slots of this engine are not read")

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Refuse; see ``Engine.write_slot``."""
        raise EngineError("slots of this engine are not written")


@dataclass(slots=True)
class WrappedEngine:
    """A base of engines around another one, ``engine``, which they have these from."""

    engine: Engine

    @property
    def limits(self) -> EngineLimits:
        """Capacities of the engine."""
        return self.engine.limits

    @property
    def is_row_invariant(self) -> bool:
        """Whether the engine promises I2."""
        return self.engine.is_row_invariant

    @property
    def packs_rows(self) -> bool:
        """Whether the engine packs rows."""
        return self.engine.packs_rows

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in what ``read_slot`` returns."""
        return self.engine.token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of what ``read_state`` returns at most."""
        return self.engine.state_bytes

    def first_start(self, slot: int) -> int:
        """Return the least start but 0 that a slot takes; see ``Engine.first_start``."""
        return self.engine.first_start(slot)

    def read_state(self, slot: int) -> SlotState:
        """Return a copy of a slot's state; see ``Engine.read_state``."""
        return self.engine.read_state(slot)

    def write_state(self, slot: int, state: SlotState) -> None:
        """Give a slot the state of its text; see ``Engine.write_state``."""
        self.engine.write_state(slot, state)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the slot's last span; see ``Engine.keep_path``."""
        self.engine.keep_path(slot, path)

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first tokens of each slot; see ``Engine.trim``."""
        self.engine.trim(lengths)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def check_sources(sources: Sequence[Source], limits: EngineLimits, vocab_size: int) -> int:
    """Refuse sources that no engine with these limits may read; return the length of the longest.

    Args:
        sources: one per slot of a contiguous range, ascending.
        limits: of the engine.
        vocab_size: of the sources' tokens.

    Raises:
        EngineError: naming the slot and the rule it breaks; nothing was computed.
    """
    if limits.max_source == 0:
        raise EngineError(NO_ENCODER)
    if not sources:
        raise EngineError("read needs at least one source")
    first = sources[0].slot
    if first < 0 or first + len(sources) > limits.max_batch:
        raise EngineError(
            f"slots {first}..{first + len(sources) - 1} are outside 0..{limits.max_batch - 1}"
        )
    for row, source in enumerate(sources):
        slot, tokens = first + row, source.tokens
        if source.slot != slot:
            raise EngineError(f"slot {source.slot} follows {slot - 1}: slots must be consecutive")
        if not 1 <= len(tokens) <= limits.max_source:
            raise EngineError(
                f"slot {slot}: source of {len(tokens)} tokens, must be 1..{limits.max_source}"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise EngineError(
                f"slot {slot}: a token id of the source is outside 0..{vocab_size - 1}"
            )
    return max(len(source.tokens) for source in sources)


def check_share(slot: int, destinations: Sequence[int], lengths: Sequence[int]) -> None:
    """Refuse to copy a source that a slot does not have, or to slots outside the engine.

    ``lengths`` [max_batch] are the tokens of every slot's source, 0 where it has none.

    Raises:
        EngineError: naming the slot and the rule; nothing was copied.
    """
    max_batch = len(lengths)
    for one in (slot, *destinations):
        if not 0 <= one < max_batch:
            raise EngineError(f"share of a source with slot {one}: slots are 0..{max_batch - 1}")
    if not lengths[slot]:
        raise EngineError(f"slot {slot} has no source to share")


def check_have_sources(spans: Sequence[Span], lengths: Sequence[int]) -> None:
    """Refuse tokens for slots without a source, of a model that has an encoder; ``lengths`` as for ``check_share``.

    Raises:
        EngineError: naming the slot; nothing was computed.
    """
    for span in spans:
        if span.tokens and not lengths[span.slot]:
            raise EngineError(f"slot {span.slot} has no source: read one before its text")


def check_spans(
    spans: Sequence[Span], limits: EngineLimits, lengths: Sequence[int]
) -> tuple[int, int]:
    """Refuse spans that no engine with these limits may run.

    ``lengths`` [max_batch] are the valid tokens of every slot before this extend.

    Returns:
        Longest span and greatest ``num_logits``.

    Raises:
        EngineError: naming the slot and the rule it breaks; nothing was computed.
    """
    if not spans:
        raise EngineError("extend needs at least one span")
    first = spans[0].slot
    if first < 0 or first + len(spans) > limits.max_batch:
        raise EngineError(
            f"slots {first}..{first + len(spans) - 1} are outside 0..{limits.max_batch - 1}"
        )
    longest = most_wanted = 0
    for row, span in enumerate(spans):
        num_tokens = len(span.tokens)
        # One comparison chain per rule keeps the good path short: this runs in every step.
        if (
            span.slot != first + row
            or not 0 <= span.start <= lengths[span.slot]
            or num_tokens > limits.max_extend
            or (span.parents is None and span.start + num_tokens > limits.max_context)
            or not 0 <= span.num_logits <= num_tokens
        ):
            raise EngineError(_broken_rule(span, first + row, limits, lengths))
        if span.parents is not None:
            _check_tree(span, span.parents, limits)
        if num_tokens:
            longest = max(longest, num_tokens)
            most_wanted = max(most_wanted, span.num_logits)
            if min(span.tokens) < 0 or max(span.tokens) >= limits.vocab_size:
                raise EngineError(
                    f"slot {span.slot}: a token id is outside 0..{limits.vocab_size - 1}"
                )
    return longest, most_wanted


def check_open(spans: Sequence[Span], max_open: int, floors: Sequence[int]) -> None:
    """Refuse spans that start before what was settled of their slots, or leave too much open (I5).

    Args:
        spans: that passed ``check_spans``.
        max_open: tokens that may be open.
        floors: [max_batch] settled tokens of every slot before this extend, its first start but 0.

    Raises:
        EngineError: naming the slot and the rule it breaks; nothing was computed.
    """
    for span in spans:
        floor = floors[span.slot] if span.start else 0
        num_tokens, num_settled = len(span.tokens), span.num_settled
        if span.start < floor:
            raise EngineError(
                f"slot {span.slot}: start {span.start} is before its {floor} settled tokens, and not 0"
            )
        if not 0 <= num_settled <= num_tokens:
            raise EngineError(
                f"slot {span.slot}: num_settled {num_settled} must be 0..{num_tokens}"
            )
        num_open = span.start + num_tokens - (span.start + num_settled if num_settled else floor)
        if num_open > max_open:
            raise EngineError(
                f"slot {span.slot}: {num_open} tokens would be open, limit max_open = {max_open}"
            )


def floor_behind(span: Span, floor: int) -> int:
    """Return the settled tokens of a slot behind a span, of which ``floor`` were settled before it."""
    if span.num_settled:
        return span.start + span.num_settled
    return floor if span.start else 0


def cut_to_floors(lengths: Sequence[int | None], floors: list[int]) -> list[int | None]:
    """Return the lengths that slots can be cut to, and set to 0 the floors of those of which that is nothing.

    Args:
        lengths: that ``Engine.trim`` was given.
        floors: [max_batch] settled tokens of every slot, rewritten.
    """
    kept: list[int | None] = []
    for slot, floor in enumerate(floors):
        length = lengths[slot] if slot < len(lengths) else None
        if (length or 0) < floor:
            length, floors[slot] = None if length is None else 0, 0
        kept.append(length)
    return kept


def floor_without_state(limits: EngineLimits) -> int:
    """Return the first start of a slot whose tokens were written, and whose state was not yet: beyond any text."""
    return limits.max_context + 1


def check_state_read(slot: int, lengths: Sequence[int], floors: Sequence[int]) -> None:
    """Refuse to read the state of a slot that has settled nothing.

    Raises:
        EngineError: naming the rule.
    """
    if not 0 <= slot < len(lengths):
        raise EngineError(f"read of slot {slot}: slots are 0..{len(lengths) - 1}")
    if not 0 < floors[slot] <= lengths[slot]:
        raise EngineError(f"slot {slot}: it has no settled text whose state could be read")


def check_state_write(
    slot: int,
    state: SlotState,
    size: int,
    limits: EngineLimits,
    held: tuple[Sequence[int], Sequence[int]],
) -> None:
    """Refuse to write a state that is not of a slot's text.

    Args:
        slot: its text was written.
        state: to write.
        size: numbers of a state of such a text.
        limits: of the engine.
        held: tokens of every slot, and their first starts.

    Raises:
        EngineError: naming the rule; nothing was written.
    """
    lengths, floors = held
    if not 0 <= slot < len(lengths):
        raise EngineError(f"write to slot {slot}: slots are 0..{len(lengths) - 1}")
    if lengths[slot] != state.length or floors[slot] != floor_without_state(limits):
        raise EngineError(f"slot {slot}: its text is not {state.length} tokens that were written")
    if state.values.shape != (size,):
        raise EngineError(
            f"slot {slot}: a state of shape {state.values.shape}, this engine's is ({size},)"
        )


def num_valid(span: Span) -> int:
    """Tokens its slot holds after a span: of a tree, those that follow one another from its root on."""
    if span.parents is None:
        return span.start + len(span.tokens)
    return span.start + chain_length(span.parents)


def check_kept_path(path: Sequence[int], slot: int, tree: Span | None) -> Span:
    """Return the slot's last span; refuse a path that it does not have.

    ``tree`` is that span if it was a tree and nothing was kept of it since.

    Raises:
        EngineError: naming the slot and the rule; nothing was moved.
    """
    if tree is None or tree.parents is None:
        raise EngineError(f"slot {slot}: its last span was no tree, or its path was kept already")
    try:
        check_path(path, tree.parents)
    except EngineError as error:
        raise EngineError(f"slot {slot}: {error}") from error
    return tree


def check_move(
    source: int, destination: int, length: int, lengths: Sequence[int], floor: int = 0
) -> None:
    """Refuse a move outside the slots or of more tokens than the source holds, or of fewer than it has settled.

    ``floor`` is the first start of the source.

    Raises:
        EngineError: naming the rule; nothing was moved.
    """
    max_batch = len(lengths)
    if not (0 <= source < max_batch and 0 <= destination < max_batch):
        raise EngineError(f"move {source} -> {destination}: slots are 0..{max_batch - 1}")
    if not 0 <= length <= lengths[source]:
        raise EngineError(f"move of {length} tokens: slot {source} holds {lengths[source]}")
    if 0 < length < floor:
        raise EngineError(f"move of {length} tokens: slot {source} has {floor} settled ones")


def check_read(slot: int, start: int, end: int, lengths: Sequence[int]) -> None:
    """Refuse to read tokens that a slot does not hold.

    Raises:
        EngineError: naming the rule.
    """
    if not 0 <= slot < len(lengths):
        raise EngineError(f"read of slot {slot}: slots are 0..{len(lengths) - 1}")
    if not 0 <= start <= end <= lengths[slot]:
        raise EngineError(f"read of tokens {start}..{end}: slot {slot} holds {lengths[slot]}")


def check_write(
    slot: int,
    start: int,
    values: FloatArray,
    shape: Sequence[int],
    limits: EngineLimits,
    lengths: Sequence[int],
) -> int:
    """Refuse to write tokens that a slot cannot hold, or values that no slot holds; return the number of tokens.

    ``shape`` is that of one token's values.

    Raises:
        EngineError: naming the rule; nothing was written.
    """
    if not 0 <= slot < len(lengths):
        raise EngineError(f"write to slot {slot}: slots are 0..{len(lengths) - 1}")
    if values.ndim != len(shape) or (*values.shape[:-2], 1, values.shape[-1]) != tuple(shape):
        raise EngineError(
            f"write to slot {slot}: values of shape {values.shape}, a token's is {tuple(shape)}"
        )
    if not 0 <= start <= lengths[slot]:
        raise EngineError(f"slot {slot}: start {start} is beyond its {lengths[slot]} valid tokens")
    num_tokens: int = values.shape[-2]
    if start + num_tokens > limits.max_context:
        rule = f"limit max_context = {limits.max_context}"
        raise EngineError(f"slot {slot}: start {start} + {num_tokens} tokens, {rule}")
    return num_tokens


def _check_tree(span: Span, parents: tuple[int, ...], limits: EngineLimits) -> None:
    num_tokens = len(span.tokens)
    if limits.max_tree_nodes == 0:
        raise EngineError(f"slot {span.slot}: this engine takes no trees")
    if num_tokens > limits.max_tree_nodes:
        raise EngineError(
            f"slot {span.slot}: tree of {num_tokens} tokens, "
            f"limit max_tree_nodes = {limits.max_tree_nodes}"
        )
    if len(parents) != num_tokens - 1:
        raise EngineError(f"slot {span.slot}: {len(parents)} parents for {num_tokens} tokens")
    check_parents(parents)
    # Side branches need columns of the cache, which has room for them, but no positions.
    num_positions = span.start + 1 + int(tree_layout(parents).depths.max())
    if num_positions > limits.max_context:
        raise EngineError(
            f"slot {span.slot}: the tree reaches {num_positions} tokens, "
            f"limit max_context = {limits.max_context}"
        )


def _broken_rule(span: Span, slot: int, limits: EngineLimits, lengths: Sequence[int]) -> str:
    num_tokens = len(span.tokens)
    if span.slot != slot:
        return f"slot {span.slot} follows {slot - 1}: slots must be consecutive"
    if span.start < 0:
        return f"slot {slot}: start {span.start} must be >= 0"
    if span.start > lengths[slot]:
        return f"slot {slot}: start {span.start} is beyond its {lengths[slot]} valid tokens"
    if num_tokens > limits.max_extend:
        return f"slot {slot}: span of {num_tokens} tokens, limit max_extend = {limits.max_extend}"
    if span.start + num_tokens > limits.max_context:
        return (
            f"slot {slot}: start {span.start} + {num_tokens} tokens, "
            f"limit max_context = {limits.max_context}"
        )
    return f"slot {slot}: num_logits {span.num_logits} must be 0..{num_tokens}"
