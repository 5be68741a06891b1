"""The path of a draft tree that the target keeps: the definition, in float64.

Pure functions of probabilities and given random numbers. They draw no noise and know no engine, request or device. The
judges in ``engines`` are tested against them.

Symbols: p is the target's row at a node, q_k the distribution of a node's k-th candidate given the candidates before it
and everything above, u a uniform.

Why it is exact. At one node each test is a round of ``verification`` against what is left of the target's row. A
candidate x is kept with mass min(q_k, cur)(x), and cur becomes norm((cur - q_k)+), the distribution of the mass that
is not kept. So the token has distribution p, whether a candidate or the remaining row gives it. The next node is
judged only when it was reached, which was decided before it is looked at. For point masses this is one draw from p per
node: a candidate that equals the draw is kept. Two published mistakes would break it: a second draw where the first
matched nothing, and a draw per path for a node that paths share.

Source: Miao et al. 2023 (arXiv:2305.09781, SpecInfer).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.core.tree import DraftTree
from outrider.runtime.oracle.verification import SMALLEST_RESIDUAL, Probs


def match_walk(tree: DraftTree, target_tokens: IntArray) -> tuple[tuple[int, ...], int]:
    """Return the path of nodes that equal the target's own draws, and the draw after them, which is emitted.

    Exact for any tree, because the emitted tokens are the target's draws.

    Args:
        tree: of N nodes, from any drafter.
        target_tokens: [N + 1] int64, the one draw (or argmax) of the target after each node. Only those on the path
            are used, so at most one draw per position.

    Returns:
        Kept nodes from the root's child down, and the next token.
    """
    path: list[int] = []
    node = 0
    while True:
        drawn = int(target_tokens[node])
        agreeing = [child for child in tree.candidates[node] if tree.tokens[child - 1] == drawn]
        if not agreeing:
            return tuple(path), drawn
        node = agreeing[0]
        path.append(node)


def judge_candidates(
    tokens: IntArray,
    candidate_probs: Probs,
    target_row: Probs,
    uniforms: Probs,
    *,
    lenience: float = 1.0,
) -> tuple[int | None, Probs]:
    """Return the candidate of a node that is kept, or the probabilities of the token drawn instead.

    Args:
        tokens: [K] int64, in the order they were drafted.
        candidate_probs: [K, V] float64, row k of candidate k given those before it; rows sum to 1.
        target_row: [V] float64, sums to 1.
        uniforms: [K] float64 in [0, 1), one coin per candidate.
        lenience: l in (0, 1]; at any l no token is emitted with more than p / l: candidates are tested against the
            same rows as at 1, and each is reached at most as often.

    Returns:
        Index of the first candidate kept, or None, and the remaining probabilities [V]: where none was kept, of the
        token to draw. Without candidates that is the target's own row.
    """
    current = target_row
    for index, token in enumerate(tokens):
        proposed = candidate_probs[index]
        if uniforms[index] * lenience * proposed[token] < current[token]:
            return index, current
        residual: Probs = np.maximum(current - proposed, 0.0)
        mass = residual.sum()
        current = residual / mass if mass > SMALLEST_RESIDUAL else current
    return None, current


def node_wise_walk(
    tree: DraftTree,
    candidate_probs: Sequence[Probs],
    target_probs: Probs,
    uniforms: Sequence[Probs],
    *,
    lenience: float = 1.0,
) -> tuple[tuple[int, ...], Probs]:
    """Return the path that the target keeps of a tree of sampled candidates, and the next token's probabilities.

    Args:
        tree: of N nodes.
        candidate_probs: per node [K, V] float64, of each of its K candidates.
        target_probs: [N + 1, V] float64, rows sum to 1.
        uniforms: per node [K] float64 in [0, 1).
        lenience: l in (0, 1]; 1 is exact.
    """
    path: list[int] = []
    node = 0
    while True:
        candidates = tree.candidates[node]
        kept, remaining = judge_candidates(
            np.array([tree.tokens[child - 1] for child in candidates], dtype=np.int64),
            candidate_probs[node],
            target_probs[node],
            uniforms[node],
            lenience=lenience,
        )
        if kept is None:
            return tuple(path), remaining
        node = candidates[kept]
        path.append(node)


def drawn_first(draft_row: Probs, tokens: Sequence[int]) -> Probs:
    """Return the probabilities [K, V] float64 of a token that was drawn, and of those left out of that draw.

    Args:
        draft_row: [V] float64, sums to 1.
        tokens: [K] different ids: the drawn one, of positive probability, then those that were known before.
    """
    rows = np.zeros((len(tokens), len(draft_row)))
    rows[0] = draft_row
    rows[0, list(tokens[1:])] = 0.0
    rows[0] /= rows[0].sum()
    rows[range(1, len(tokens)), list(tokens[1:])] = 1.0
    return rows
