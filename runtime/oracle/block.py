"""Block verification: judges a draft as a whole, and keeps at least as much of it as token by token; in float64.

Pure functions of probabilities and given coins. Samplers are tested against them, as against
``runtime.oracle.verification`` for the rule that judges token by token. That rule wastes a ratio p / q above 1; here it
makes up for a later one below 1.

Symbols: p is target_probs, q is draft_probs, x the draft, P_i the weight of its first i tokens (P_0 = 1), S_i the mass
of (P_i p_{i+1} - q_{i+1})+, h_i the chance that the run of i tokens is kept when no longer one is, eta_i its coin.

Why it is exact: at least i tokens are kept with probability P_i given the first i, by induction from the end: for
i = gamma it is h_gamma = P_gamma; before, a longer run than i is kept with sum_x min(q, P_i p) = P_i - S_i, and exactly
i with h_i (1 - P_i + S_i) = S_i. So x follows with mass min(q, P_i p)(x), and as the token after a run of i with
S_i norm((P_i p - q)+)(x): together P_i p(x), and P_0 = 1. The draft may end anywhere that its own tokens decide.

For a point mass q on the draft token both rules emit the same distribution.

Source: Sun et al. 2024, "Block verification accelerates speculative decoding" (arXiv:2403.10444), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from outrider.engines.base import IntArray
from outrider.runtime.oracle.verification import (
    SMALLEST_RESIDUAL,
    Probs,
    RowOf,
    coin_cells,
    run_probs,
)


def prefix_weights(draft_tokens: IntArray, draft_probs: Probs, target_probs: Probs) -> Probs:
    """Return P_0..P_G, [G + 1] float64: P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)).

    A draft token of probability 0, which cannot have been drafted, has weight 0.

    Args:
        draft_tokens: [G] int64.
        draft_probs: [G, V] float64, rows sum to 1.
        target_probs: [G + 1, V] float64, rows sum to 1.
    """
    weights = np.ones(len(draft_tokens) + 1)
    for index, token in enumerate(draft_tokens):
        proposed, wanted = draft_probs[index, token], target_probs[index, token]
        ratio = weights[index] * wanted / proposed if proposed > 0.0 else 0.0
        weights[index + 1] = min(1.0, ratio)
    return weights


def block_thresholds(draft_tokens: IntArray, draft_probs: Probs, target_probs: Probs) -> Probs:
    """Return h_1..h_G, [G] float64: i tokens are kept iff their coin is below h_i and no longer run is kept.

    h_i = S_i / (S_i + 1 - P_i), where 0/0 is 1; h_G = P_G.

    Args:
        draft_tokens: [G] int64.
        draft_probs: [G, V] float64, rows sum to 1.
        target_probs: [G + 1, V] float64, rows sum to 1.
    """
    weights = prefix_weights(draft_tokens, draft_probs, target_probs)
    thresholds = weights[1:].copy()
    for index in range(1, len(draft_tokens)):
        weight = weights[index]
        mass = _excess(weight, target_probs[index], draft_probs[index]).sum()
        thresholds[index - 1] = 1.0 if weight == 1.0 else mass / (mass + 1.0 - weight)
    return thresholds


def count_accepted_block(
    draft_tokens: IntArray, draft_probs: Probs, target_probs: Probs, uniforms: Probs
) -> int:
    """Return the length of the longest run whose coin is below its threshold; a run of weight 0 is never kept.

    Args:
        draft_tokens: [G] int64.
        draft_probs: [G, V] float64, rows sum to 1.
        target_probs: [G + 1, V] float64, rows sum to 1.
        uniforms: [G] float64 in [0, 1), entry i - 1 the coin of the run of i tokens.
    """
    kept = np.flatnonzero(uniforms < block_thresholds(draft_tokens, draft_probs, target_probs))
    return int(kept[-1]) + 1 if len(kept) else 0


def next_token_probs_block(
    num_accepted: int, draft_tokens: IntArray, draft_probs: Probs, target_probs: Probs
) -> Probs:
    """Return the probabilities [V] of the token after the kept run.

    They are norm((P_i p_{i+1} - q_{i+1})+), or the bonus row after the whole draft.

    Args:
        num_accepted: i, from ``count_accepted_block``.
        draft_tokens: [G] int64.
        draft_probs: [G, V] float64, rows sum to 1.
        target_probs: [G + 1, V] float64, rows sum to 1.
    """
    target: Probs = target_probs[num_accepted]
    if num_accepted == len(draft_tokens):
        return target
    weight = prefix_weights(draft_tokens, draft_probs, target_probs)[num_accepted]
    residual = _excess(weight, target, draft_probs[num_accepted])
    mass = residual.sum()
    if mass <= SMALLEST_RESIDUAL:
        return target
    normalised: Probs = residual / mass
    return normalised


def emitted_probs_block(
    draft_row: RowOf, target_row: RowOf, gamma: int
) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of a round's tokens under block verification; see ``verification.run_probs``.

    Args:
        draft_row: [V] float64 probabilities of a draft token, given the tokens drafted before it.
        target_row: [V] float64 probabilities of the target, given the same.
        gamma: draft tokens of the round.
    """

    def judged(
        tokens: IntArray, draft_probs: Probs, target_probs: Probs
    ) -> Iterator[tuple[float, int, Probs]]:
        for coins, volume in coin_cells(block_thresholds(tokens, draft_probs, target_probs)):
            kept = count_accepted_block(tokens, draft_probs, target_probs, coins)
            yield volume, kept, next_token_probs_block(kept, tokens, draft_probs, target_probs)

    return run_probs(draft_row, target_row, gamma, judged)


def _excess(weight: float, target: Probs, draft: Probs) -> Probs:
    """Return (P p - q)+, [V] float64 of sum S."""
    excess: Probs = np.maximum(weight * target - draft, 0.0)
    return excess
