"""What ``grouped.onnx`` is told of places: where tokens stand and which columns the cache has.

Both follow from ``start`` and from shapes. A graph that works them out by itself runs a dozen nodes per call on a few
numbers each, a tenth of a small model's call (python -m scripts.bench_graph); here it is an addition per token.

Pure: numpy alone; knows no inference library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.base import IntArray
from engines.bundle import CACHE_COLUMNS, POSITIONS
from engines.small_arrays import elements

PLACE_INPUTS = frozenset({POSITIONS, CACHE_COLUMNS})
"""Inputs of ``grouped.onnx`` beside those of ``model.onnx``; graphs of before lack them."""


@dataclass(frozen=True, slots=True)
class PlaceInputs:
    """Arrays of one call.

    Attributes:
        positions: [B, T] int64, of every token; padding stands at ``last_position`` at most.
        cache_columns: [S] int64, 0 to S - 1.
        last_position: greatest that the model knows.
    """

    positions: IntArray
    cache_columns: IntArray
    last_position: int
    _elements: memoryview[int]
    _num_tokens: int

    @classmethod
    def empty(
        cls, num_rows: int, num_tokens: int, *, capacity: int, last_position: int
    ) -> PlaceInputs:
        """Of a shape; positions are to be filled."""
        positions = np.zeros((num_rows, num_tokens), dtype=np.int64)
        return cls(
            positions=positions,
            cache_columns=np.arange(capacity, dtype=np.int64),
            last_position=last_position,
            _elements=elements(positions),
            _num_tokens=num_tokens,
        )

    def fill_row(self, row: int, start: int) -> None:
        """Write the positions of a row whose span begins at ``start``."""
        positions, last = self._elements, self.last_position
        first = row * self._num_tokens
        for at in range(first, first + self._num_tokens):
            positions[at] = start if start < last else last
            start += 1

    def feeds(self) -> Mapping[str, IntArray]:
        """By name of the input."""
        return {POSITIONS: self.positions, CACHE_COLUMNS: self.cache_columns}


def place_feeds(
    start: IntArray, num_tokens: int, *, capacity: int, last_position: int
) -> Mapping[str, IntArray]:
    """Inputs of one call, for who binds none.

    Args:
        start: [B] int64.
        num_tokens: T.
        capacity: S.
        last_position: greatest that the model knows.
    """
    places = PlaceInputs.empty(
        len(start), num_tokens, capacity=capacity, last_position=last_position
    )
    for row, first in enumerate(start.tolist()):
        places.fill_row(row, first)
    return places.feeds()
