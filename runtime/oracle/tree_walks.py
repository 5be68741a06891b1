"""Which path of a draft tree the target keeps: the definition, in float64.

Pure functions of probabilities and given random numbers; no noise is drawn, no engine,
request or device is known. The judges in ``engines`` are tested against these functions.

Symbols: p is the target's row at a node, q_k the law of a node's k-th candidate given the candidates before it and
everything above, u a uniform.

Why it is exact. At one node each test is a round of ``verification`` against what is left of the target's row: a
candidate x is kept with mass min(q_k, cur)(x), and cur becomes norm((cur - q_k)+), which is exactly the law that the
mass not kept still owes. So whichever way the node is left, by a candidate or by the row that remains, the token has
law p; and the next node is judged only when it was reached, which was decided before it is looked at. For point masses
this is one draw from p per node: a candidate that equals the draw is kept. Two things would break it, and both have
been published: drawing again where the draw matched nothing, and drawing once per path for a node that paths share.

Source: Miao et al. 2023 (arXiv:2305.09781, SpecInfer) for candidates drawn independently; Jeon et al. 2024
(arXiv:2402.14160, recursive rejection sampling) for candidates drawn without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.core.tree import DraftTree
from outrider.runtime.oracle.verification import SMALLEST_RESIDUAL, Probs


def match_walk(tree: DraftTree, target_tokens: IntArray) -> tuple[tuple[int, ...], int]:
    """Path of nodes that equal the target's own draws, and the draw after them, which is emitted.

    Exact for any tree: the emitted tokens are the target's draws whatever was drafted.

    Args:
        tree: of N nodes, however they were found.
        target_tokens: [N + 1] int64, the one draw (or argmax) of the target after each node. Only those on the path
            are looked at, so at most one draw is used per position.

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
    offer_probs: Probs,
    target_row: Probs,
    uniforms: Probs,
    *,
    lenience: float = 1.0,
) -> tuple[int | None, Probs]:
    """Which of a node's candidates is kept, or the law of the token that is drawn instead.

    Args:
        tokens: [K] int64, in the order they were drafted.
        offer_probs: [K, V] float64, row k is the law of candidate k given those before it; rows sum to 1.
        target_row: [V] float64, sums to 1.
        uniforms: [K] float64 in [0, 1), one coin per candidate.
        lenience: l in (0, 1]; at any l no token is emitted with more than p / l: candidates are tested against the
            same rows as at 1, and each is reached at most as often.

    Returns:
        Index of the first candidate kept, or None, and the law [V] that remains: where none was kept, of the token to
        draw. Without candidates that is the target's own row.
    """
    current = target_row
    for index, token in enumerate(tokens):
        proposed = offer_probs[index]
        if uniforms[index] * lenience * proposed[token] < current[token]:
            return index, current
        residual: Probs = np.maximum(current - proposed, 0.0)
        mass = residual.sum()
        current = residual / mass if mass > SMALLEST_RESIDUAL else current
    return None, current


def node_wise_walk(
    tree: DraftTree,
    offer_probs: Sequence[Probs],
    target_probs: Probs,
    uniforms: Sequence[Probs],
    *,
    lenience: float = 1.0,
) -> tuple[tuple[int, ...], Probs]:
    """Path that the target keeps of a tree of sampled candidates, and the law of the token after it.

    Args:
        tree: of N nodes.
        offer_probs: per node [K, V] float64, the law of each of its K offers.
        target_probs: [N + 1, V] float64, rows sum to 1.
        uniforms: per node [K] float64 in [0, 1).
        lenience: l in (0, 1]; 1 is exact.
    """
    path: list[int] = []
    node = 0
    while True:
        offered = tree.candidates[node]
        kept, remaining = judge_candidates(
            np.array([tree.tokens[child - 1] for child in offered], dtype=np.int64),
            offer_probs[node],
            target_probs[node],
            uniforms[node],
            lenience=lenience,
        )
        if kept is None:
            return tuple(path), remaining
        node = offered[kept]
        path.append(node)


def without_replacement(draft_row: Probs, tokens: Sequence[int]) -> Probs:
    """[K, V] float64: the law of each token drawn from a row after the ones before it were taken out.

    Args:
        draft_row: [V] float64, sums to 1.
        tokens: [K] different ids of positive probability.
    """
    rows = np.zeros((len(tokens), len(draft_row)))
    left = draft_row.copy()
    for index, token in enumerate(tokens):
        rows[index] = left / left.sum()
        left[token] = 0.0
    return rows
