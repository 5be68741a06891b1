"""Arrays of a few integers, kept and written again and again beside the calls of a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import IntArray


def int64_view(array: IntArray) -> memoryview[int]:
    """The elements of an int64 array without gaps, in order, to be written one by one.

    A few numbers take a view of memory a tenth of a microsecond each; numpy takes one to five microseconds per call,
    and ten times that where a model's call has pushed its code out of the processor's caches.
    """
    return array.data.cast("B").cast("q")


class TokenArrays:
    """Token ids as the compiled loops take them; an array is good until the next of its length.

    Args:
        longest: tokens at most.
    """

    def __init__(self, longest: int) -> None:
        array = np.zeros(max(longest, 1), dtype=np.int64)
        self._elements = int64_view(array)
        self._by_length = [array[:length] for length in range(longest + 1)]

    def of(self, tokens: Sequence[int]) -> IntArray:
        """[n] int64 of n tokens."""
        for at, token in enumerate(tokens):
            self._elements[at] = token
        return self._by_length[len(tokens)]
