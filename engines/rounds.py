"""A round of speculation that stays on the device: its rows and their answers.

Pure value types and one protocol; an accelerator's add-on implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engines.base import EngineError
from outrider.engines.sampling.base import SamplingParams, SamplingRow, Verdict


class DraftError(EngineError):
    """The draft model failed before anything was verified; its caches of all rows are undefined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One decoding row.

    Attributes:
        sampling: its ``draft_tokens`` are those of a draft the host made, or empty. Its ``index`` is
            its ``slot``. The target has all of its history but the last token.
        gamma: tokens the draft model is to draft; 0 for a row with a draft of the host, or none.
    """

    sampling: SamplingRow
    gamma: int

    @property
    def num_drafted(self) -> int:
        """Draft tokens that will be judged."""
        return self.gamma or len(self.sampling.draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Rows to draft, verify and judge in one go.

    Attributes:
        rows: decoding rows, by ascending slot; at least one.
        starts: per slot up to that of the last row, tokens valid in the target's cache.
        draft_starts: likewise in the draft model's, of rows that it drafts for all but a few of the
            history; what is missing is fed.
    """

    rows: Sequence[RoundRow]
    starts: Sequence[int]
    draft_starts: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswer:
    """Draft and verdict of one row.

    Attributes:
        draft_tokens: the whole draft. Where the model drafted, it may go on behind an end token,
            which the device does not know.
        verdict: its judgement.
    """

    draft_tokens: tuple[int, ...]
    verdict: Verdict


def do_nothing() -> None:
    """Default of ``meanwhile``: nothing."""


class Rounds(Protocol):
    """Runs rounds over a target, its draft and a sampler that share a device."""

    def why_not(self, params: SamplingParams) -> str:
        """Say why rows with these parameters cannot be judged on the device; empty where they can."""
        ...

    def run(self, asked: Round, meanwhile: Callable[[], None] = do_nothing) -> list[RoundAnswer]:
        """Return one answer per row, in their order.

        Args:
            asked: the round.
            meanwhile: called once all of it is enqueued, before it is waited for; not where it
                failed before. What it enqueues on the engines is not waited for; it may extend
                slots without rows in the round, for no logits.

        Raises:
            DraftError: the draft model failed; nothing was verified.
            EngineError: the target or the sampler failed; the caches of all rows are undefined.
        """
        ...
