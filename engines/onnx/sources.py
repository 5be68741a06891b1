"""Sources of all slots on ONNX Runtime's CPU provider: ``encode.onnx``, and the cache that it writes.

What every decoder layer attends to of a source, its keys and values, is computed once. The cache's memory is bound as
the graph's past and present, as that of texts is (``engines.kv_cache``), and to calls of the decoder's graphs as inputs
that have no outputs.

    one slot   [0 ... length) its source   [length ... L) padding of the call   [L ... capacity) zero

Padding is token 0, which no row attends to: lengths say where each source ends. A call has two columns at least, so
that no product has a single row; from two on a row's bits do not depend on the call's shape (``engines.onnx.engine``).

A draft whose encoder is the target's reads what that answered (``cross.onnx``). The target keeps it for each slot as
long as the slot's source; of a slot that has another source, or none, its encoder answers again, with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from outrider.engines.base import (
    BundleError,
    EngineError,
    EngineLimits,
    FloatArray,
    IntArray,
    Source,
)
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import (
    ENCODE_FILE,
    HIDDEN,
    SOURCE,
    SOURCE_LENGTH,
    SourceEntry,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.kv_cache import MIN_SPAN, KvCache, source_capacities
from outrider.engines.onnx.session import (
    LIBRARY_ERRORS,
    bind_past,
    bind_present,
    check_encode_graph,
    open_session,
)
from outrider.engines.spans import check_share, check_sources


@dataclass(frozen=True, slots=True)
class _Answered:
    """A source and what the encoder answered, [tokens, width] float32."""

    tokens: tuple[int, ...]
    hidden: FloatArray


class OnnxSources:
    """The encoder of one model, and what its decoder attends to.

    Args:
        bundle: a verified bundle.
        entry: one of its models, which has an encoder.
        source: that encoder.
        limits: of the engine.
        num_threads: of the pool that all sessions of the process share.
        encoder: that of the target, which answers for this one from now on; None where it has its own.

    Raises:
        BundleError: a graph does not fit its entry.
        EngineError: the library cannot load it.
    """

    def __init__(
        self,
        bundle: Bundle,
        entry: ModelEntry,
        source: SourceEntry,
        limits: EngineLimits,
        *,
        num_threads: int,
        encoder: OnnxSources | None = None,
    ) -> None:
        path = bundle.cross_path(entry) if encoder else bundle.encode_path(entry)
        self._session = open_session(path, num_threads=num_threads)
        check_encode_graph(self._session, entry, source, file=path.name)
        self._limits, self._vocab_size = limits, source.vocab_size
        self._encoder, self._width = encoder, source.hidden_size
        # By slot, of an encoder that answers for a draft's too.
        self._answered: dict[int, _Answered] = {}
        self._keeps_answers = False
        if encoder is not None:
            encoder.keep_answers(f"{entry.path}/{path.name}")
        self._heads = source.num_heads, source.head_size
        self._past = cross_past_names(entry.num_layers)
        self._present = cross_present_names(entry.num_layers)
        self._cache = KvCache(
            heads=[(source.num_heads, source.head_size)] * entry.num_layers,
            num_slots=limits.max_batch,
            capacities=source_capacities(limits),
            growth_room=1,
        )
        # Those of the cache, in memory that calls are bound to.
        self._lengths = np.zeros(limits.max_batch, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """Tokens of a source that a slot of the cache has room for at present."""
        return self._cache.capacity

    @property
    def lengths(self) -> list[int]:
        """[max_batch] tokens of each slot's source, 0 where it has none."""
        return self._cache.lengths

    def keep_answers(self, reader: str) -> None:
        """Keep what the encoder answers from now on, for a graph called ``reader``.

        Raises:
            BundleError: the encoder's graph does not tell.
        """
        if HIDDEN not in {tensor.name for tensor in self._session.get_outputs()}:
            raise BundleError(f"{reader}: the target's {ENCODE_FILE} has no output {HIDDEN!r}")
        self._keeps_answers = True

    def check(self, sources: Sequence[Source]) -> int:
        """Return the columns of the call that reads these; EngineError for sources that break a limit."""
        return max(MIN_SPAN, check_sources(sources, self._limits, self._vocab_size))

    def make_room(self, sources: Sequence[Source], num_tokens: int) -> bool:
        """Forget the slots' sources, and have room for others; whether the cache's memory was replaced.

        Raises:
            EngineError: more memory could not be had; other slots stay as they were.
        """
        for source in sources:
            self._set_length(source.slot, 0)
        return self._cache.reserve(num_tokens)

    def read(self, sources: Sequence[Source], num_tokens: int) -> None:
        """Read sources that there is room for in a call of ``num_tokens`` columns.

        Raises:
            EngineError: ONNX Runtime failed; the given slots have no source.
        """
        first, num_rows = sources[0].slot, len(sources)
        given: npt.NDArray[Any]
        if self._encoder is None:
            name, given = SOURCE, _padded(sources, num_tokens)
        else:
            name, given = HIDDEN, self._encoder.answers(sources, num_tokens)
        for source in sources:
            self._cache.begin_write(source.slot, 0, num_tokens)
        lengths = _lengths_of(sources)
        binding = self._session.io_binding()
        _bind(binding, {name: given, SOURCE_LENGTH: lengths})
        bind_past(binding, self._past, self._cache.rows(first, num_rows))
        bind_present(binding, self._present, self._cache.rows(first, num_rows))
        hidden = self._bind_answers(binding, num_rows, num_tokens) if self._keeps_answers else None
        self._run(binding)
        for row, source in enumerate(sources):
            length = len(source.tokens)
            self._set_length(source.slot, length)
            if hidden is not None:
                self._answered[source.slot] = _Answered(source.tokens, hidden[row, :length].copy())

    def answers(self, sources: Sequence[Source], num_tokens: int) -> FloatArray:
        """Return what the encoder answers to sources in a call of ``num_tokens`` columns.

        Returns:
            [B, num_tokens, width] float32; behind a source it holds anything.

        Raises:
            EngineError: not all were read in these slots, and ONNX Runtime failed.
        """
        held = [self._answered.get(source.slot) for source in sources]
        hidden = np.zeros((len(sources), num_tokens, self._width), np.float32)
        for row, (source, one) in enumerate(zip(sources, held, strict=True)):
            if one is None or one.tokens != source.tokens:
                return self._answer(sources, num_tokens)
            hidden[row, : len(one.tokens)] = one.hidden
        return hidden

    def _answer(self, sources: Sequence[Source], num_tokens: int) -> FloatArray:
        """Return the same, computed without a slot."""
        tokens, lengths = _padded(sources, num_tokens), _lengths_of(sources)
        heads, size = self._heads
        unused = np.zeros((len(sources), heads, num_tokens, size), np.float32)
        binding = self._session.io_binding()
        _bind(
            binding, {SOURCE: tokens, SOURCE_LENGTH: lengths, **dict.fromkeys(self._past, unused)}
        )
        for name in self._present:
            binding.bind_output(name, "cpu", 0, np.float32, unused.shape, unused.ctypes.data)
        hidden = self._bind_answers(binding, len(sources), num_tokens)
        self._run(binding)
        return hidden

    def _bind_answers(
        self, binding: onnxruntime.IOBinding, num_rows: int, num_tokens: int
    ) -> FloatArray:
        hidden = np.empty((num_rows, num_tokens, self._width), np.float32)
        binding.bind_output(HIDDEN, "cpu", 0, np.float32, hidden.shape, hidden.ctypes.data)
        return hidden

    def _run(self, binding: onnxruntime.IOBinding) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error

    def bind(self, binding: onnxruntime.IOBinding, *, slot: int, num_rows: int) -> None:
        """Bind the sources of slots to a call of a decoder's graph; their lengths stay those of the moment."""
        lengths = self._lengths[slot : slot + num_rows]
        binding.bind_input(SOURCE_LENGTH, "cpu", 0, np.int64, lengths.shape, lengths.ctypes.data)
        bind_past(binding, self._past, self._cache.rows(slot, num_rows))

    def check_share(self, slot: int, destinations: Sequence[int]) -> None:
        """Refuse to share a source that is not there; see ``engines.spans``."""
        check_share(slot, destinations, self.lengths)

    def move(self, slot: int, destination: int) -> None:
        """Copy a slot's source over another's, or that it has none."""
        length = self._cache.lengths[slot]
        answered = self._answered.get(slot)
        self._cache.move(slot, destination, length)
        self._set_length(destination, length)
        if answered is not None:
            self._answered[destination] = answered

    def trim(self, lengths: Sequence[int | None]) -> bool:
        """Forget sources of slots without a length, and of slots beyond; whether the memory was replaced.

        Where none is kept it is the least at once: a request of 24 tokens whose source needs more takes .6 % longer
        for it (T5-small's size).

        Raises:
            EngineError: smaller memory could not be had; what was kept stays valid.
        """
        held = self._cache.lengths
        kept = [
            None if text is None else length for text, length in zip(lengths, held, strict=False)
        ]
        try:
            return self._cache.trim(kept) if any(kept) else self._cache.reset()
        finally:
            self._lengths[:] = self._cache.lengths
            for slot in [slot for slot in self._answered if not self._lengths[slot]]:
                del self._answered[slot]

    def _set_length(self, slot: int, length: int) -> None:
        self._cache.lengths[slot] = self._lengths[slot] = length
        self._answered.pop(slot, None)


def _padded(sources: Sequence[Source], num_tokens: int) -> IntArray:
    """Return the tokens of sources, [B, num_tokens] int64."""
    tokens = np.zeros((len(sources), num_tokens), dtype=np.int64)
    for row, source in enumerate(sources):
        tokens[row, : len(source.tokens)] = source.tokens
    return tokens


def _lengths_of(sources: Sequence[Source]) -> IntArray:
    return np.array([len(source.tokens) for source in sources], dtype=np.int64)


def _bind(binding: onnxruntime.IOBinding, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
    """Bind arrays, which live until the call was made."""
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
