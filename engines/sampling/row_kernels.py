"""Compiled loops over one draft: the whole proposal or judgement of a row, or of all greedy rows, in one call."""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int64, types, uint64, void
from outrider.engines.jit import njit_exact
from outrider.engines.sampling import philox
from outrider.engines.sampling.kernels import (
    IDS_TYPE,
    ONE,
    ROW_TYPE,
    WIDE_TYPE,
    FloatArray,
    IdArray,
    WideArray,
    draw,
    greatest,
    judge_token,
    write_shared,
)
from outrider.engines.sampling.truncation import write_dense

_ROWS = float32[:, ::1]
_BATCH = float32[:, :, ::1]

# Columns of a table of greedy rows (``judge_greedy``).
ROW, DRAFTED, KEPT, TOKEN, DRAFT = range(5)


@njit_exact(int64(ROW_TYPE, float64, float64, float64, uint64, int64, int64, _ROWS, WIDE_TYPE))
def propose_token(
    logits: FloatArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    seed: int,
    start: int,
    depth: int,
    drafts: FloatArray,
    totals: WideArray,
) -> int:
    """Write the weights of a draft token where they are kept, and draw from them.

    Args:
        logits: [n] of the draft, n at most V; where they are not finite, all mass is on token 0.
        inverse_temperature: 1 / temperature.
        top_p: see ``write_dense``.
        min_p: likewise.
        seed: of the request, 64 bits.
        start: length of the sequence when the round began.
        depth: tokens drafted before.
        drafts: [G, V]; row ``depth`` is overwritten, 0 from n on.
        totals: [G] sums of the rows.
    """
    weights = drafts[depth][: logits.shape[0]]
    mass = write_dense(logits, inverse_temperature, top_p, min_p, weights)
    if mass == 0.0:
        weights[:] = np.float32(0.0)
        weights[0] = ONE
        mass = 1.0
    drafts[depth][logits.shape[0] :] = np.float32(0.0)
    totals[depth] = mass
    uniform = philox.uniform(seed, philox.ROUND_STREAM, philox.DRAFT_WORD, start + depth, start + 1)
    return draw(weights, uniform * mass)


@njit_exact(
    types.UniTuple(int64, 3)(
        _ROWS, IDS_TYPE, _ROWS, WIDE_TYPE, float64, float64, float64, float64, uint64, int64,
        ROW_TYPE, ROW_TYPE, WIDE_TYPE,
    )
)  # fmt: skip
def judge_draft(
    logits: FloatArray,
    tokens: IdArray,
    drafts: FloatArray,
    draft_totals: WideArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    lenience: float,
    seed: int,
    start: int,
    weights: FloatArray,
    scratch: FloatArray,
    overlaps: WideArray,
) -> tuple[int, int, int]:
    """Keep sampled draft tokens by the ratio test, and draw the one after them.

    Args:
        logits: [at least G + 1, V] of the target.
        tokens: [G] the draft.
        drafts: [at least G, V] q of each, as ``propose_token`` wrote them.
        draft_totals: [at least G] their sums.
        inverse_temperature: 1 / temperature of the target.
        top_p: see ``write_dense``.
        min_p: likewise.
        lenience: (0, 1]; see ``kernels.is_kept``.
        seed: of the request, 64 bits.
        start: length of the sequence when the round began.
        weights: [V] to write in.
        scratch: [V] to write in.
        overlaps: [at least G], overwritten at each position reached: the sum of min(p, q).

    Returns:
        How many tokens are kept, the next one, and 1 if p stood in for a residual of rounding. No next one, -1, where
        logits are not finite.
    """
    stream, round_number = philox.ROUND_STREAM, start + 1
    for i in range(tokens.shape[0]):
        mass = write_dense(logits[i], inverse_temperature, top_p, min_p, weights)
        if mass == 0.0:
            return 0, -1, 0
        shared_mass = write_shared(weights, drafts[i], mass / draft_totals[i], scratch)
        overlaps[i] = shared_mass / mass
        token, target_weight, draft_weight = tokens[i], 0.0, 0.0
        if 0 <= token < weights.shape[0]:
            target_weight, draft_weight = float(weights[token]), float(drafts[i, token])
        coin = philox.uniform(seed, stream, philox.ACCEPT_WORD, start + i, round_number)
        is_kept, left = judge_token(
            coin, lenience, target_weight, mass, draft_weight, draft_totals[i], weights, scratch
        )
        if is_kept:
            continue
        uniform = philox.uniform(seed, stream, philox.RECOVER_WORD, start + i, round_number)
        if left == 0.0:
            return i, draw(weights, uniform * mass), 1
        return i, draw(scratch, uniform * left), 0
    gamma = tokens.shape[0]
    mass = write_dense(logits[gamma], inverse_temperature, top_p, min_p, weights)
    if mass == 0.0:
        return 0, -1, 0
    uniform = philox.uniform(seed, stream, philox.BONUS_WORD, start + gamma, round_number)
    return gamma, draw(weights, uniform * mass), 0


@njit_exact(
    types.UniTuple(int64, 2)(_ROWS, IDS_TYPE, float64, float64, float64, uint64, int64, ROW_TYPE)
)
def match_draft(
    logits: FloatArray,
    tokens: IdArray,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
    seed: int,
    start: int,
    weights: FloatArray,
) -> tuple[int, int]:
    """Draw the target's own token at each position, as long as the draft agrees.

    Arguments are those of ``judge_draft``.

    Returns:
        How many tokens are kept, and the next one; -1 where logits are not finite.
    """
    gamma, drawn = tokens.shape[0], -1
    for i in range(gamma + 1):
        mass = write_dense(logits[i], inverse_temperature, top_p, min_p, weights)
        if mass == 0.0:
            return 0, -1
        uniform = philox.uniform(seed, philox.MATCH_STREAM, philox.MATCH_WORD, start + i, 0)
        drawn = draw(weights, uniform * mass)
        if i == gamma or drawn != tokens[i]:
            return i, drawn
    return gamma, drawn


@njit_exact(void(_BATCH, int64[:, ::1], int64, int64))
def propose_greedy(logits: FloatArray, table: IdArray, count: int, vocab_size: int) -> None:
    """Write each row's greatest token, 0 where its logits are not finite.

    Args:
        logits: [B, at least 1, at least V] of the draft; column 0 of each row is used.
        table: as for ``judge_greedy``; reads ROW, writes TOKEN.
        count: of rows.
        vocab_size: V of the target.

    Raises:
        IndexError: there is no such row.
    """
    for row in range(count):
        if table[row, ROW] >= logits.shape[0]:
            raise IndexError("there are no such logits")
        table[row, TOKEN] = max(greatest(logits[table[row, ROW], 0, :vocab_size]), 0)


@njit_exact(void(_BATCH, int64[:, ::1], int64))
def judge_greedy(logits: FloatArray, table: IdArray, count: int) -> None:
    """Keep each row's draft tokens as long as they are the greatest.

    Args:
        logits: [B, at least G + 1, V] of the target.
        table: [at least ``count``, DRAFT + G] whose columns are the row of ``logits`` (ROW), the tokens drafted
            (DRAFTED) and from DRAFT on the draft itself; written are how many of them are kept (KEPT) and the next
            token, -1 where logits are not finite (TOKEN).
        count: of rows.

    Raises:
        IndexError: there is no such row, it has fewer columns, or the table has no room for the draft.
    """
    for row in range(count):
        at, gamma = table[row, ROW], table[row, DRAFTED]
        if at >= logits.shape[0] or gamma >= logits.shape[1]:
            raise IndexError("there are no such logits")
        if gamma > table.shape[1] - DRAFT:
            raise IndexError("the draft is longer than any")
        for i in range(gamma + 1):
            best = greatest(logits[at, i])
            table[row, KEPT], table[row, TOKEN] = i, best
            if best < 0:
                table[row, KEPT] = 0
                break
            if i < gamma and best != table[row, DRAFT + i]:
                break
