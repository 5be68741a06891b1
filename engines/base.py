"""The engine contract: spans of tokens in, logits out.

An engine extends slots of a KV cache by spans of tokens. It knows nothing of requests, drafts, sampling or sockets;
prefill, decode and verify are one operation, told apart only by their shapes. Pure: standard library and numpy.

Invariants every engine keeps (held by ``tests/engines/contract.py``):

* I1  The logits of a span depend only on the tokens of that slot up to that position: on no other row, no padding and
  no token beyond ``start`` left there by an earlier, longer extend (truncation moves no data).
* I2  Where ``Engine.is_row_invariant`` is true, they are the same bits whatever the batch, the span length and the
  cache capacity were.
* I3  A span may be a tree (``Span.parents``): each token then sees the cached text and the tokens above it, and no
  other, so its logits are those of the chain from the root to it. I2 covers tokens whose chain stands without a gap
  at the span's beginning; others see the same values at other columns of the cache, which rounds differently.
* I4  Of a model with an encoder, they depend on the slot's own source too, and on no other. Where I2 holds, they are
  the same bits whatever sources were read in the same call and whatever room the sources' cache had.
* I5  Of recurrent layers a slot keeps the state behind its *settled* text alone; the tokens behind that are *open*. A
  span may start anywhere from ``Engine.first_start`` to what the slot holds: that costs nothing and moves no data, and
  I1 and I2 hold from there, whatever was rejected. Such engines take no trees: each branch would need a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def step_value(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a value that every step makes anew; it has slots and takes keywords only.

    Type checkers refuse to write to it; at run time nothing does. What refuses it there (``frozen=True``) makes the
    dozen such values of a row cost three times as much: 77 us of a step of eight rows with cold caches, 4 % of 2 ms.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


class SpeculativeError(Exception):
    """Base of every error of this project; never raised itself."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what was said and the attributes; constructors of subclasses take other arguments."""
        return _error_of, (type(self), self.args, self.__dict__)


def _error_of(
    kind: type[SpeculativeError], arguments: tuple[object, ...], attributes: dict[str, object]
) -> SpeculativeError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class BundleError(SpeculativeError):
    """A bundle or checkpoint does not fit its manifest; raised at load only."""


class EngineError(SpeculativeError):
    """A backend failed inside a step; chained from the library's own error."""


class DeviceLostError(BaseException):
    """Every later call of this process on its device fails too: no ``Exception``, for no step can be tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacities of an engine.

    Attributes:
        max_batch: slots.
        max_context: tokens of one slot that may ever be valid.
        max_extend: tokens of one span at most.
        vocab_size: width V of a row of logits.
        max_tree_nodes: tokens of a tree at most, its root included; 0 where no trees are taken.
        max_prompt_rows: rows that one call runs together whatever their length; 0 for ``max_batch``.
        max_source: tokens of a source at most; 0 for a model without an encoder, which reads none.
        max_open: tokens that a slot may hold behind its settled text; None for any, of a model without states.
        parallel_token: stands for tokens that are not known yet, in a model that was taught to continue over them;
            None for any other.
        reads_features: numbers that a head reads beside each token, of its target; 0 for a model of its own.
    """

    max_batch: int
    max_context: int
    max_extend: int
    vocab_size: int
    max_tree_nodes: int = 0
    max_prompt_rows: int = 0
    max_source: int = 0
    max_open: int | None = None
    parallel_token: int | None = None
    reads_features: int = 0


@step_value
class Span:
    """Tokens to append to one slot.

    Attributes:
        slot: row of the KV cache.
        start: tokens of the slot that stay valid; the span's keys and values are written from there on, so a start
            below what was computed before truncates the slot.
        tokens: ids to feed; empty for a live row that takes no part in this extend.
        num_logits: the logits of the span's last ``num_logits`` tokens are wanted, 0..len(tokens).
        parents: None for a chain. For a tree, the parents of tokens 1, 2, ...: token 0, the root, follows the cached
            text, and token i + 1 follows token ``parents[i]``, one of 0..i (``engines.trees``). Until ``keep_path`` the
            slot then holds only the tokens from the root on that follow one another.
        num_settled: leading tokens that will not be taken back.
        features: [len(tokens), F] float32, what a head reads beside the tokens; None for any other model.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    num_logits: int
    parents: tuple[int, ...] | None = None
    num_settled: int = 0
    features: FloatArray | None = None


@step_value
class Source:
    """What an encoder reads for one slot: every later extend of the slot attends to it.

    Attributes:
        slot: row of the caches.
        tokens: ids of the source's vocabulary, 1..``EngineLimits.max_source`` of them.
    """

    slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What a slot keeps of recurrent layers behind its settled text.

    Attributes:
        length: tokens of that text.
        values: [n] float32 on the host; their order is the engine's.
    """

    length: int
    values: FloatArray


class Engine(Protocol):
    """One loaded model with its KV cache. Not thread-safe: one thread owns it."""

    @property
    def limits(self) -> EngineLimits:
        """Capacities of this engine."""
        ...

    @property
    def is_row_invariant(self) -> bool:
        """True if this backend promises I2."""
        ...

    @property
    def packs_rows(self) -> bool:
        """True if weights multiply a batch's own tokens alone, and no padding to its longest span."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in what ``read_slot`` returns; 0 where slots are neither read nor written."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of what ``read_state`` returns at most; 0 without states."""
        ...

    def read(self, sources: Sequence[Source]) -> None:
        """Read sources for consecutive slots, whose texts are empty afterwards.

        Args:
            sources: one per slot of a contiguous range, ascending.

        Raises:
            EngineError: the model has no encoder, or a source breaks a limit (nothing was computed or changed); or the
                backend failed: the given slots then have no source, and no text.
        """
        ...

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        """Copy a slot's source to other slots, whose texts are empty afterwards.

        Raises:
            EngineError: a slot is outside the engine, or this one has no source (nothing was changed); or the backend
                failed: the destinations then have no source, and no text.
        """
        ...

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans to consecutive slots and return the wanted logits.

        Of a model with an encoder, a slot needs a source before it is given tokens.

        Args:
            spans: one per slot of a contiguous range, ascending; rows that take no part pass an empty span.

        Returns:
            [B, R, V] float32 on the engine's device, valid until the next extend of this engine; entry (b, j) for
            j < spans[b].num_logits follows the (num_logits - j)-th last token of the span, later columns are padding.

        Raises:
            EngineError: a span breaks a limit (nothing was computed), or the backend failed: the given slots' texts
                are then undefined, their sources as they were.
        """
        ...

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Make a path of the slot's last span, a tree, the tokens that follow its ``start``.

        What was cached of the path is moved into place on the device; the rest of the tree is forgotten. Not needed
        where the path stands at the span's beginning without a gap, but allowed there.

        Args:
            slot: whose last extend was a tree.
            path: indices in that span from the root (0) down, each the parent of the next.

        Raises:
            EngineError: there is no such path (nothing changed), or the backend failed (the slot is undefined).
        """
        ...

    def first_start(self, slot: int) -> int:
        """Return the least start but 0 that a slot takes without being fed again (I5); 0 without states."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the source of one slot, if it has one, and its first ``length`` cached tokens over another.

        ``length`` is 0, or at least ``first_start(source)``.
        """
        ...

    def read_slot(self, slot: int, start: int, end: int) -> FloatArray:
        """Return a copy of what a slot caches of its tokens ``start`` to ``end``.

        Returns:
            [..., end - start, D] float32 on the host; the first axes and D are the engine's.

        Raises:
            EngineError: the slot holds fewer tokens, or this engine's slots are not read.
        """
        ...

    def write_slot(self, slot: int, start: int, values: FloatArray) -> None:
        """Make tokens that were read from a slot the text of a slot behind its first ``start`` tokens.

        The slot goes on as if it had been extended by the tokens; with I2, in the same bits. With states it takes no
        span but from 0 on before ``write_state``.

        Args:
            slot: holds ``start`` tokens at least.
            start: place of the first of these tokens, the one at which it was read.
            values: [..., n, D] float32 of n consecutive tokens, as ``read_slot`` returned them.

        Raises:
            EngineError: the slot holds fewer tokens or has no room, the values are no such (nothing changed), or this
                engine's slots are not written.
        """
        ...

    def read_state(self, slot: int) -> SlotState:
        """Return a copy of the state at ``first_start``.

        Raises:
            EngineError: the slot has settled nothing, or this engine keeps no states.
        """
        ...

    def write_state(self, slot: int, state: SlotState) -> None:
        """Give a slot the state of its text, all of which was written by ``write_slot``.

        Raises:
            EngineError: the state is of another length or engine, the slot has one already, or this engine keeps none
                (nothing changed).
        """
        ...

    def trim(self, lengths: Sequence[int | None]) -> None:
        """Forget all but the first ``lengths[s]`` tokens of each slot s, and whole slots beyond.

        Of a slot without a length, None, all is forgotten, its source too. A slot whose length lies below its
        ``first_start`` holds no text afterwards. May give memory back that a long slot
        needed; called when slots have become free.

        Raises:
            EngineError: smaller buffers could not be had; what was kept stays valid.
        """
        ...

    def close(self) -> None:
        """Free the device's memory; the engine is unusable afterwards."""
        ...
