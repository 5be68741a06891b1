"""Judges drafts that are trees: of point masses by any sampler, of candidates by the one that drew them.

Of point masses: at each node the target's own token is drawn as plain decoding would draw it there, and followed if it
is a child; the first draw that is none is emitted. So an answer never depends on the tree, whatever it was made from:
it is the very answer of plain decoding under the same seed (``runtime.oracle.tree_walks.match_walk`` is the
definition). There is one draw per position, since a walk visits one node per depth. All walks of a batch go down
together, one call of the sampler per depth.

Sampled candidates are judged by ratio (``engines.sampling.candidates``), but for greedy and
seed_stable rows and samplers that cannot: matching is exact for them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling.base import (
    CandidateSampler,
    ExactnessMode,
    Sampler,
    SamplingRow,
    TokenLogprobs,
    Verdict,
)
from outrider.engines.sampling.draws import choices_of, in_place


def judge(sampler: Sampler, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
    """Judge the chains and trees of a batch; see ``engines.sampling.base.Sampler.judge``.

    Args:
        sampler: draws, and judges the chains.
        logits: [B, R, V] float32 of the target; of a tree, column n follows node n.
        rows: what to judge, in any order; trees have ``parents``.

    Returns:
        One verdict per row, in their order.
    """
    if all(row.parents is None for row in rows):
        return sampler.judge(logits, rows)
    logits = in_place(logits)
    are_walked = [row.parents is not None and not _has_draft_probs(sampler, row) for row in rows]
    whole = [row for row, is_walked in zip(rows, are_walked, strict=True) if not is_walked]
    walked = [row for row, is_walked in zip(rows, are_walked, strict=True) if is_walked]
    of_whole = iter(sampler.judge(logits, whole) if whole else [])
    of_walked = iter(_judge_trees(sampler, logits, walked))
    return [next(of_walked if is_walked else of_whole) for is_walked in are_walked]


def _has_draft_probs(sampler: Sampler, row: SamplingRow) -> bool:
    """Say whether a tree is judged by the probabilities of its candidates."""
    return (
        row.candidates is not None
        and not row.params.is_greedy
        and row.mode is not ExactnessMode.SEED_STABLE
        and isinstance(sampler, CandidateSampler)
    )


class _Walk:
    """State of one tree's judgement."""

    def __init__(self, row: SamplingRow) -> None:
        self.row = row
        self.node = 0
        self.path: list[int] = []
        self.next_token: int | None = None
        self._has_conflict = False
        self._logprobs: list[TokenLogprobs] = []

    def row_here(self, index: int) -> SamplingRow:
        """Return a row of plain decoding behind the path so far, for row ``index`` of the logits passed along."""
        kept = np.array([self.row.draft_tokens[node - 1] for node in self.path], dtype=np.int64)
        masks = self.row.masks
        return replace(
            self.row,
            index=index,
            history=np.concatenate([self.row.history, kept]) if self.path else self.row.history,
            draft_tokens=(),
            parents=None,
            candidates=None,
            is_sampled_draft=False,
            num_choices=0,
            masks=masks if masks is None else masks[self.node : self.node + 1],
        )

    def advance(self, drawn: Verdict) -> bool:
        """Follow the token drawn here; False where the walk ends with it."""
        if drawn.next_token is None:
            self.path.clear()
            self._has_conflict = drawn.has_conflict
            return False
        self._logprobs.extend(drawn.logprobs)
        assert self.row.parents is not None
        for child, (parent, token) in enumerate(
            zip(self.row.parents, self.row.draft_tokens, strict=True), start=1
        ):
            if parent == self.node and token == drawn.next_token:
                self.path.append(child)
                self.node = child
                return True
        self.next_token = drawn.next_token
        return False

    def verdict(self, logits: FloatArray) -> Verdict:
        """Return the verdict of a finished walk; logits [R, V] of the row."""
        if self.next_token is None:
            return Verdict(num_accepted=0, next_token=None, has_conflict=self._has_conflict)
        nodes = logits[: len(self.row.draft_tokens) + 1]
        return Verdict(
            num_accepted=len(self.path),
            next_token=self.next_token,
            logprobs=tuple(self._logprobs),
            choices=choices_of(nodes, self.row.num_choices) if self.row.num_choices else (),
            path=tuple(self.path),
        )


def _judge_trees(
    sampler: Sampler, logits: FloatArray, rows: Sequence[SamplingRow]
) -> list[Verdict]:
    walks = [_Walk(row) for row in rows]
    active = walks
    while active:
        # One row of logits per walk: what a sampler does with whole batches, it does with these.
        here = np.stack([logits[walk.row.index, walk.node] for walk in active])[:, None]
        drawn = sampler.judge(here, [walk.row_here(at) for at, walk in enumerate(active)])
        active = [
            walk for walk, verdict in zip(active, drawn, strict=True) if walk.advance(verdict)
        ]
    return [walk.verdict(logits[walk.row.index]) for walk in walks]
