"""Inputs of a graph that verifies trees beside those of every graph: positions and ancestors.

Pure: numpy alone; knows no inference library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from outrider.engines.base import IntArray, Span
from outrider.engines.trees import BoolArray, tree_layout


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs of ``tree.onnx`` beside those of ``model.onnx``.

    Attributes:
        positions: [B, T] int64.
        ancestors: [B, T, T] bool.
    """

    positions: IntArray
    ancestors: BoolArray

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int) -> TreeInputs:
        """Arrays to be filled row by row."""
        return cls(
            positions=np.zeros((num_rows, num_tokens), dtype=np.int64),
            ancestors=np.zeros((num_rows, num_tokens, num_tokens), dtype=np.bool_),
        )

    def fill_row(self, row: int, span: Span, last_position: int) -> None:
        """Write one row's shape; padded columns see themselves and stand at a valid position."""
        num_tokens = len(span.tokens)
        positions, ancestors = self.positions[row], self.ancestors[row]
        positions.fill(min(span.start, last_position))
        ancestors.fill(False)
        np.fill_diagonal(ancestors, True)
        if span.parents is None:
            positions[:num_tokens] = span.start + np.arange(num_tokens)
            ancestors[:num_tokens, :num_tokens] = np.tri(num_tokens, dtype=np.bool_)
        else:
            layout = tree_layout(span.parents)
            positions[:num_tokens] = span.start + layout.depths
            ancestors[:num_tokens, :num_tokens] = layout.ancestors
