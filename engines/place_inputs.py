"""What ``grouped.onnx`` is told of places: where tokens stand and which columns the cache has.

Both follow from ``start`` and from shapes. A graph that works them out by itself runs a dozen nodes per call on a few
numbers each, a tenth of a small model's call (python -m scripts.bench_graph); here it is one addition.

Pure: numpy alone; knows no inference library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.base import IntArray
from engines.bundle import CACHE_COLUMNS, POSITIONS

PLACE_INPUTS = frozenset({POSITIONS, CACHE_COLUMNS})
"""Inputs of ``grouped.onnx`` beside those of ``model.onnx``; graphs of before lack them."""


@dataclass(frozen=True, slots=True)
class PlaceInputs:
    """Arrays of one call.

    Attributes:
        positions: [B, T] int64, of every token; padding stands at ``last_position`` at most.
        cache_columns: [S] int64, 0 to S - 1.
        offsets: [T] int64, 0 to T - 1.
        last_position: greatest that the model knows.
    """

    positions: IntArray
    cache_columns: IntArray
    offsets: IntArray
    last_position: int

    @classmethod
    def empty(
        cls, num_rows: int, num_tokens: int, *, capacity: int, last_position: int
    ) -> PlaceInputs:
        """Of a shape; positions are to be filled."""
        return cls(
            positions=np.zeros((num_rows, num_tokens), dtype=np.int64),
            cache_columns=np.arange(capacity, dtype=np.int64),
            offsets=np.arange(num_tokens, dtype=np.int64),
            last_position=last_position,
        )

    def fill(self, start: IntArray) -> None:
        """Write the positions of spans that begin at ``start`` [B] int64."""
        np.add(start[:, None], self.offsets, out=self.positions)
        np.minimum(self.positions, self.last_position, out=self.positions)

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
    places.fill(start)
    return places.feeds()
