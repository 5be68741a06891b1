"""Wide calls of a text alone that is far shorter than the longest, over a cache that is no longer than it needs.

Attention computes all columns of a call, valid or not, and every slot has as many as the longest text needs. For a
chunk of a prompt they cost far more than copying the text to a cache of one slot, and the chunk back. (ONNX Runtime
1.31.1, two threads, a layer of SmolLM2-135M: 256 tokens with 256 of 4,096 columns valid 25.9 ms, copied 1.8; with all
valid, copying costs 4 %.)
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import Span
from outrider.engines.kv_cache import KvCache
from outrider.engines.onnx.calls import Call, OnnxCalls
from outrider.engines.onnx.packed_inputs import PackedShape

# Columns of all slots for one that is needed, from which a text is copied. It bounds the memory, too: half a slot.
_FAR_SHORTER = 2
# Tokens of a call from which it is wide: a text is copied for it, and spans of few tokens are left out of it.
LEAST_WIDE = 32


class ShortTexts:
    """The cache of one slot that such texts are copied to.

    Args:
        cache: of all slots, of layers without rings.
        own: of one slot, of the same layers.
        calls: over it.
    """

    def __init__(self, cache: KvCache, own: KvCache, calls: OnnxCalls) -> None:
        self._cache, self._own, self.calls = cache, own, calls

    def takes(self, spans: Sequence[Span], num_tokens: int) -> bool:
        """Return whether a call over spans, padded to so many tokens, is a wide one of a short text alone."""
        if len(spans) > 1 or num_tokens < LEAST_WIDE:
            return False
        needed = self._own.capacity_for(spans[0].start + num_tokens)
        return _FAR_SHORTER * needed <= self._cache.capacity

    def call(self, span: Span, sizes: PackedShape) -> Call:
        """Copy the text before a span, and return the call that will compute it.

        Raises:
            EngineError: more memory could not be had.
        """
        own, end = self._own, span.start + sizes.num_tokens
        if own.reserve(end):
            self.calls.clear()
        own.begin_write(0, 0, end)
        own.copy(self._cache, span.slot, 0, 0, span.start)
        return self.calls.of(0, sizes, is_tree=False)

    def put_back(self, span: Span, num_tokens: int) -> None:
        """Copy the columns that the call has written to the span's slot."""
        end = span.start + num_tokens
        self._own.lengths[0] = end
        self._cache.copy(self._own, 0, span.slot, span.start, end)

    def trim(self) -> None:
        """Forget the text; less memory, where the last ones were far shorter, replaces this.

        Raises:
            EngineError: the smaller memory could not be had.
        """
        if self._own.trim([]):
            self.calls.clear()
