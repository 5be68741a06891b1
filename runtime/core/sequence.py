"""The tokens of one request, prompt and answer, in an array that is allocated once."""

from __future__ import annotations

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.core.params import RequestSpec

SEPARATOR = -1
"""Stands between source and answer in the text that drafts are found in; no token of any vocabulary."""


class TokenSequence:
    """Known tokens, and room for those that may still be emitted.

    Attributes:
        tokens: [prompt + max_output] int64, the same array for life; the first ``num_known`` are committed. Where a
            source may be quoted, it lies before them, and ``SEPARATOR`` between.
        end_tokens: ids that end the answer.
        is_quoted: whether a source lies before the tokens.
        max_output: tokens of the answer at most, at least 1.
        num_prompt: tokens of the prompt.
        num_known: prompt and committed output tokens.
        num_pending: last tokens that the constraint forced behind the last judged one; no pass has read them yet.
        last_token: the last of the known ones.

    Args:
        spec: what was asked for.
        max_context: tokens of a slot.
        first: of the same group, whose tokens are copied: an array is faster than a tuple by far.
    """

    __slots__ = (
        "_array",
        "_cells",
        "_num_quoted",
        "end_tokens",
        "is_quoted",
        "last_token",
        "max_output",
        "num_known",
        "num_pending",
        "num_prompt",
        "tokens",
    )

    def __init__(
        self, spec: RequestSpec, max_context: int, first: TokenSequence | None = None
    ) -> None:
        self.num_prompt = self.num_known = num_prompt = len(spec.prompt_tokens)
        self.num_pending = 0
        # Where no token is wanted, one is drawn and discarded: the prompt's end takes the way of all others.
        self.max_output = min(max(1, spec.max_tokens), max_context - num_prompt)
        self.end_tokens = frozenset(spec.params.end_token_ids)
        self.is_quoted = spec.source_is_quotable and bool(spec.source_tokens)
        quoted = (*spec.source_tokens, SEPARATOR) if self.is_quoted else ()
        self._num_quoted = len(quoted)
        num_given = len(quoted) + num_prompt
        self._array = np.zeros(num_given + self.max_output, dtype=np.int64)
        self._array[:num_given] = (
            (*quoted, *spec.prompt_tokens) if first is None else first._array[:num_given]
        )
        self.tokens = self._array[len(quoted) :]
        # Written one by one: numpy takes ten times as long for a few numbers.
        self._cells = self.tokens.data.cast("B").cast("q")
        self.last_token = spec.prompt_tokens[-1]

    @property
    def history(self) -> IntArray:
        """[num_known] int64 view of prompt and committed output."""
        return self.tokens[: self.num_known]

    @property
    def text(self) -> IntArray:
        """[n] int64 view of ``history`` behind a source that may be quoted."""
        return self._array[: self._num_quoted + self.num_known]

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return self.num_known - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_output + self.num_prompt - self.num_known

    def append(self, run: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Append tokens, at least one, up to the first end token or the limit; say whether one of these was met."""
        cells, ends, start = self._cells, self.end_tokens, self.num_known
        end, is_over = start, False
        for token in run:
            cells[end] = self.last_token = token
            end += 1
            is_over = token in ends or end == len(cells)
            if is_over:
                break
        self.num_known = end
        return run[: end - start], is_over

    def take_back(self, num_tokens: int) -> None:
        """Remove the last tokens; a prompt stays."""
        self.num_known -= num_tokens
        self.last_token = int(self.tokens[self.num_known - 1])
