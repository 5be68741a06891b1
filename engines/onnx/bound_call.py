"""One call of a graph that packs no rows, on the CPU: what its shape fixes, and the numbers written before each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engines.base import FloatArray, Span
from outrider.engines.tree_inputs import TreeInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCall:
    """A call of B rows of T tokens and R wanted logits each; see ``engines.buffers.elements``.

    Attributes:
        run: runs the graph over what is bound.
        num_tokens: T.
        tokens: elements of [B, T] int64.
        start: elements of [B] int64.
        logit_positions: elements of [B, R] int64.
        logits: [B, R, V] float32, where the answer will be.
        wanted: per row its tokens and wanted logits when ``logit_positions`` was written.
        last_position: greatest that the model knows.
        tree: arrays of a call in which some row is a tree, else None.
    """

    run: Callable[[], object]
    num_tokens: int
    tokens: memoryview[int]
    start: memoryview[int]
    logit_positions: memoryview[int]
    logits: FloatArray
    wanted: list[tuple[int, int] | None]
    last_position: int
    tree: TreeInputs | None

    def fill(self, spans: Sequence[Span]) -> None:
        """Write spans, each one's last token and last wanted position repeated as padding."""
        for row, span in enumerate(spans):
            self._fill_row(row, span)

    def answer(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32; padding columns repeat a column of the same row."""
        return self.logits

    def _fill_row(self, row: int, span: Span) -> None:
        tokens, at = self.tokens, row * self.num_tokens
        token = 0
        for token in span.tokens:
            tokens[at] = token
            at += 1
        for padding in range(at, (row + 1) * self.num_tokens):
            tokens[padding] = token
        self.start[row] = span.start
        if self.tree is not None:
            self.tree.fill_row(row, span, self.last_position)
        wanted = (len(span.tokens), span.num_logits)
        if self.wanted[row] != wanted:
            self.wanted[row] = wanted
            self._want(row, *wanted)

    def _want(self, row: int, num_tokens: int, num_logits: int) -> None:
        """Want the logits of a row's last ``num_logits`` of ``num_tokens`` tokens."""
        positions = self.logit_positions
        num_wanted = len(positions) // len(self.wanted)
        last = max(0, num_tokens - 1)
        for at in range(num_wanted):
            positions[row * num_wanted + at] = min(num_tokens - num_logits + at, last)
