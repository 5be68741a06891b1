"""Sources of all slots on ONNX Runtime's CPU provider: ``encode.onnx``, and the cache that it writes.

What every decoder layer attends to of a source, its keys and values, is computed once. The cache's memory is bound as
the graph's past and present, as that of texts is (``engines.kv_cache``), and to calls of the decoder's graphs as inputs
that have no outputs.

    one slot   [0 ... length) its source   [length ... L) padding of the call   [L ... capacity) zero

Padding is token 0, which no row attends to: lengths say where each source ends. A call has two columns at least, so
that no product has a single row; from two on a row's bits do not depend on the call's shape (``engines.onnx.engine``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime
from outrider.engines.base import EngineError, EngineLimits, Source
from outrider.engines.bundle.manifest import Bundle, ModelEntry
from outrider.engines.bundle.text2text import (
    SOURCE,
    SOURCE_LENGTH,
    SourceEntry,
    cross_past_names,
    cross_present_names,
)
from outrider.engines.kv_cache import MIN_SPAN, KvCache, source_capacities
from outrider.engines.onnx.session import (
    LIBRARY_ERRORS,
    bind_past,
    bind_present,
    check_encode_graph,
    open_session,
)
from outrider.engines.spans import check_share, check_sources


class OnnxSources:
    """The encoder of one model, and what its decoder attends to.

    Args:
        bundle: a verified bundle.
        entry: one of its models, which has an encoder.
        source: that encoder.
        limits: of the engine.
        num_threads: of the pool that all sessions of the process share.

    Raises:
        BundleError: the graph does not fit its entry.
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
    ) -> None:
        self._session = open_session(bundle.encode_path(entry), num_threads=num_threads)
        check_encode_graph(self._session, entry, source)
        self._limits, self._vocab_size = limits, source.vocab_size
        self._past = cross_past_names(entry.num_layers)
        self._present = cross_present_names(entry.num_layers)
        self._cache = KvCache(
            num_layers=entry.num_layers,
            num_kv_heads=source.num_heads,
            head_size=source.head_size,
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
        tokens = np.zeros((num_rows, num_tokens), dtype=np.int64)
        lengths = np.array([len(source.tokens) for source in sources], dtype=np.int64)
        for row, source in enumerate(sources):
            tokens[row, : len(source.tokens)] = source.tokens
            self._cache.begin_write(source.slot, 0, num_tokens)
        binding = self._session.io_binding()
        for name, array in ((SOURCE, tokens), (SOURCE_LENGTH, lengths)):
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        bind_past(binding, self._cache, self._past, slot=first, num_rows=num_rows)
        bind_present(binding, self._cache, self._present, slot=first, num_rows=num_rows)
        try:
            self._session.run_with_iobinding(binding)
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error
        for source in sources:
            self._set_length(source.slot, len(source.tokens))

    def bind(self, binding: onnxruntime.IOBinding, *, slot: int, num_rows: int) -> None:
        """Bind the sources of slots to a call of a decoder's graph; their lengths stay those of the moment."""
        lengths = self._lengths[slot : slot + num_rows]
        binding.bind_input(SOURCE_LENGTH, "cpu", 0, np.int64, lengths.shape, lengths.ctypes.data)
        bind_past(binding, self._cache, self._past, slot=slot, num_rows=num_rows)

    def check_share(self, slot: int, destinations: Sequence[int]) -> None:
        """Refuse to share a source that is not there; see ``engines.spans``."""
        check_share(slot, destinations, self.lengths)

    def move(self, slot: int, destination: int) -> None:
        """Copy a slot's source over another's, or that it has none."""
        length = self._cache.lengths[slot]
        self._cache.move(slot, destination, length)
        self._set_length(destination, length)

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

    def _set_length(self, slot: int, length: int) -> None:
        self._cache.lengths[slot] = self._lengths[slot] = length
