"""Candidates of the nodes of a tree: drawn from the draft model and judged one after another.

Of K candidates K - 1 are the likeliest tokens of the draft row, and one is drawn from the rest of it. At a node the
drawn one is tested first, then the others, each by the ratio test against what is left of the target's distribution. A
candidate is kept where u * l * q_k(x_k) < cur(x_k), else cur becomes the residual norm((cur - q_k)+). A kept candidate
is the next node; where none was kept, the token is drawn from what is left. q_1 is the draft row less the likeliest
tokens, renormalised, and every other q_k a point mass: which tokens they are is known before anything is drawn. So a
candidate is kept with probability p(S) + the sum over the rest of min(p, q_1), S being the likeliest tokens: no test of
these candidates keeps more, since outside S the target's token has to be the drawn one.

The definition, with the proof, is ``runtime.oracle.tree_walks.node_wise_walk``. A walk visits one node per depth, so
its coins and its last draw are addressed by position.

Source: Miao et al. 2023 (arXiv:2305.09781), tests one after another; which candidates, and in which order, is our own.
p is the target row, q_k the distribution of candidate k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.sampling.adjust import adjusted_token_probs, greatest_token, logits_at
from outrider.engines.sampling.base import CandidateNode, SamplingRow, Verdict
from outrider.engines.sampling.noise import NoiseSource, Purpose
from outrider.engines.sampling.token_probs import (
    TokenProbs,
    judge_token,
    point_mass,
)


class CandidateProbs:
    """Draft probabilities of the nodes of each slot's tree, by the tokens that lead to a node.

    Rows are made when first needed and kept for the slot's next trees.
    """

    def __init__(self, max_batch: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[list[FloatArray]] = [[] for _ in range(max_batch)]
        self._kept: list[dict[tuple[int, ...], TokenProbs]] = [{} for _ in range(max_batch)]

    def row(self, slot: int, path: tuple[int, ...]) -> FloatArray:
        """Return the row [V] float32 that a new node's probabilities go to; the root's row forgets the tree before."""
        if not path:
            self._kept[slot].clear()
        rows = self._rows[slot]
        if len(self._kept[slot]) == len(rows):
            rows.append(np.zeros(self._vocab_size, dtype=np.float32))
        return rows[len(self._kept[slot])]

    def keep(self, slot: int, path: tuple[int, ...], probs: TokenProbs) -> None:
        """Keep a node's probabilities; they may lie in the row that was just given for it."""
        self._kept[slot][path] = probs

    def probs_at(self, slot: int, path: tuple[int, ...]) -> TokenProbs:
        """Return the distribution that a node's candidates were drawn from."""
        return self._kept[slot][path]


def draw_candidates(
    probs: TokenProbs, count: int, uniform: float, *, scratch: FloatArray
) -> tuple[int, ...]:
    """Return different candidates of one node: one that is drawn, then the likeliest; fewer where there are no more.

    Args:
        probs: q.
        count: candidates wanted, at least 1.
        uniform: fresh number in [0, 1).
        scratch: [V] to write in.
    """
    points = likeliest(probs, count - 1, scratch)
    left = without(probs, points, scratch)
    return (left.draw(uniform), *points) if left.total() > 0.0 else points


def likeliest(probs: TokenProbs, count: int, scratch: FloatArray) -> tuple[int, ...]:
    """Return the tokens of the greatest weights, of equal ones the lower first; none of weight 0.

    Args:
        probs: q.
        count: tokens wanted.
        scratch: [V] to write in.
    """
    if probs.ids is not None:
        order = np.lexsort((probs.ids, -probs.weights))[:count]
        return tuple(int(probs.ids[at]) for at in order if probs.weights[at] > 0.0)
    left = scratch[: len(probs.weights)]
    left[:] = probs.weights
    tokens: list[int] = []
    while len(tokens) < count and left[token := int(left.argmax())] > 0.0:
        tokens.append(token)
        left[token] = 0.0
    return tuple(tokens)


def without(probs: TokenProbs, tokens: Sequence[int], scratch: FloatArray) -> TokenProbs:
    """Return a distribution without some of its tokens, unnormalised.

    Args:
        probs: q.
        tokens: to take out.
        scratch: [V] that the result may lie in.
    """
    if not tokens:
        return probs
    if probs.ids is None:
        left = scratch[: len(probs.weights)]
        left[:] = probs.weights
        left[list(tokens)] = 0.0
        return TokenProbs(left)
    is_left = ~np.isin(probs.ids, tokens)
    return TokenProbs(probs.weights[is_left], probs.ids[is_left])


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTree:
    """A sampled tree, with the sources of its probabilities and coins.

    Attributes:
        tokens: of nodes 1, 2, ...
        candidates: per node its children: the one that was drawn, then the likeliest.
        lenience: l in (0, 1]; 1 is exact.
        target_at: p behind a node, given the tokens that lead there; None where the logits are not finite, or no token
            may follow. Valid until the next call.
        is_finite_at: whether the logits behind a node are finite.
        draft_at: q behind a node, by the same tokens.
        coin: fresh number in [0, 1) of a candidate, by depth of its node and its index among its siblings.
        uniform: fresh number in [0, 1) of a purpose, by depth of the node whose token it draws.
    """

    tokens: Sequence[int]
    candidates: Sequence[tuple[int, ...]]
    lenience: float
    target_at: Callable[[int, tuple[int, ...]], TokenProbs | None]
    is_finite_at: Callable[[int], bool]
    draft_at: Callable[[tuple[int, ...]], TokenProbs]
    coin: Callable[[int, int], float]
    uniform: Callable[[Purpose, int], float]


class CandidateJudge:
    """Judges sampled trees; holds the rows it writes in."""

    def __init__(self, vocab_size: int) -> None:
        # What is left of the target's row lies in one row while the next is written to the other.
        self._left, self._next, self._draft = np.zeros((3, vocab_size), dtype=np.float32)

    def judge(self, tree: CandidateTree) -> Verdict:
        """Return the path that is kept and the token after it."""
        path: list[int] = []
        num_fallbacks = 0
        while True:
            node, tokens = path[-1] if path else 0, tuple(tree.tokens[n - 1] for n in path)
            probs = tree.target_at(node, tokens)
            if probs is None:
                return Verdict(
                    num_accepted=0, next_token=None, has_conflict=tree.is_finite_at(node)
                )
            purpose = Purpose.BONUS
            if tree.candidates[node]:
                kept, probs, num_empty = self._test(tree, node, tokens, probs)
                num_fallbacks += num_empty
                if kept is not None:
                    path.append(kept)
                    continue
                purpose = Purpose.RECOVER
            return Verdict(
                num_accepted=len(path),
                next_token=probs.draw(tree.uniform(purpose, len(path))),
                num_fallbacks=num_fallbacks,
                path=tuple(path),
            )

    def _test(
        self, tree: CandidateTree, node: int, path: tuple[int, ...], probs: TokenProbs
    ) -> tuple[int | None, TokenProbs, int]:
        """Return the child that is kept, or None and the distribution left; and how many residuals had no mass."""
        children = tree.candidates[node]
        tokens = [tree.tokens[child - 1] for child in children]
        num_empty = 0
        for index, (child, token) in enumerate(zip(children, tokens, strict=True)):
            # Where nothing was left to draw from, the first of the likeliest is all that the others leave.
            proposal = (
                point_mass(token)
                if index
                else without(tree.draft_at(path), tokens[1:], self._draft)
            )
            coin = tree.coin(len(path), index)
            judged = judge_token(probs, proposal, token, coin, tree.lenience, self._next)
            if judged.is_kept:
                return child, probs, num_empty
            probs = judged.left
            if judged.is_fallback:
                num_empty += 1
            else:
                self._left, self._next = self._next, self._left
        return None, probs, num_empty


class RowCandidates:
    """Draws and judges sampled trees of rows, and keeps their draft probabilities in between.

    Target rows are adjusted node by node, each with the tokens of its own path, and only where the walk comes by.
    """

    def __init__(self, noise: NoiseSource, max_batch: int, vocab_size: int) -> None:
        self._noise = noise
        self._vocab_size = vocab_size
        self._draft_probs = CandidateProbs(max_batch, vocab_size)
        self._judge: CandidateJudge | None = None
        self._row: FloatArray = np.zeros(0, dtype=np.float32)

    def draw(self, logits: FloatArray, point: CandidateNode) -> tuple[int, ...]:
        """Draw the children of one node; logits [V] of the draft model behind it."""
        row, path = point.row, tuple(point.row.draft_tokens)
        probs = adjusted_token_probs(
            logits_at(logits, row, len(path), node=point.column),
            row.params,
            self._draft_probs.row(row.slot, path),
        )
        probs = point_mass(0) if probs is None else probs
        self._draft_probs.keep(row.slot, path, probs)
        return draw_candidates(
            probs,
            point.count,
            self._of_sibling(row, Purpose.CANDIDATE, len(path), point.node, 0),
            scratch=self._target_row(),
        )

    def judge(self, logits: FloatArray, row: SamplingRow, lenience: float) -> Verdict:
        """Return the kept path of a row's tree and the token after it; logits [N + 1, V], row n behind node n."""
        scratch = self._target_row()

        def target_at(node: int, path: tuple[int, ...]) -> TokenProbs | None:
            here = replace(row, draft_tokens=path)
            return adjusted_token_probs(
                logits_at(logits[node], here, len(path), node=node), row.params, scratch
            )

        assert row.candidates is not None
        if self._judge is None:
            self._judge = CandidateJudge(self._vocab_size)
        start = len(row.history)
        return self._judge.judge(
            CandidateTree(
                tokens=row.draft_tokens,
                candidates=row.candidates,
                lenience=lenience,
                target_at=target_at,
                is_finite_at=lambda node: greatest_token(logits[node]) is not None,
                draft_at=lambda path: self._draft_probs.probs_at(row.slot, path),
                coin=lambda depth, index: self._of_sibling(
                    row, Purpose.CANDIDATE_COIN, depth, 0, index
                ),
                uniform=lambda purpose, depth: self._noise.uniform(
                    row.seed, purpose=purpose, position=start + depth, round_start=start
                ),
            )
        )

    def _target_row(self) -> FloatArray:
        """[V] float32, made when the first tree comes."""
        if not len(self._row):
            self._row = np.zeros(self._vocab_size, dtype=np.float32)
        return self._row

    def _of_sibling(
        self, row: SamplingRow, purpose: Purpose, depth: int, node: int, index: int
    ) -> float:
        start = len(row.history)
        return self._noise.of_sibling(
            row.seed,
            purpose=purpose,
            position=start + depth,
            round_start=start,
            node=node,
            index=index,
        )
