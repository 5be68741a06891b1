"""Rows with a law over the whole vocabulary and plain greedy ones, proposed and judged in one compiled call each.

The rules are ``engines.sampling.kernels``'; here rows become their arguments, and their answers verdicts.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.engines.base import FloatArray
from outrider.engines.buffers import TokenArrays
from outrider.engines.sampling import kernels
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.draft_probs import DraftProbs
from outrider.engines.sampling.kernels import WideArray

_SEED_MASK = (1 << 64) - 1


class Work(NamedTuple):
    """What a judgement writes in.

    Attributes:
        weights: [V] float32.
        scratch: [V] float32.
        overlaps: [max_gamma] float64.
        drafts: draft tokens.
    """

    weights: FloatArray
    scratch: FloatArray
    overlaps: WideArray
    drafts: TokenArrays


def propose_compiled(logits: FloatArray, row: SamplingRow, kept: DraftProbs) -> int:
    """Draw a draft token and keep its law.

    Args:
        logits: [n] float32 of the draft model, n at most V.
        row: neither greedy nor of shared noise, its law dense.
        kept: of its slot.
    """
    params = row.params
    token: int = kernels.propose_token(
        logits,
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        row.seed & _SEED_MASK,
        len(row.history),
        len(row.draft_tokens),
        kept.rows,
        kept.totals,
    )
    return token


def judge_compiled(
    logits: FloatArray, row: SamplingRow, kept: DraftProbs, lenience: float, work: Work
) -> Verdict:
    """Keep sampled draft tokens by the ratio test, and draw the one after them.

    Args:
        logits: [R, V] float32 of the row.
        row: a sampled draft, its law dense.
        kept: the laws of the draft.
        lenience: (0, 1].
        work: overwritten.
    """
    params, gamma = row.params, len(row.draft_tokens)
    num_accepted, token, num_fallbacks = kernels.judge_draft(
        logits,
        work.drafts.of(row.draft_tokens),
        kept.rows,
        kept.totals,
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        lenience,
        row.seed & _SEED_MASK,
        len(row.history),
        work.weights,
        work.scratch,
        work.overlaps,
    )
    if token < 0:
        return Verdict(num_accepted=0, next_token=None)
    reached = work.overlaps[: min(num_accepted + 1, gamma)]
    return Verdict(
        num_accepted=num_accepted,
        next_token=token,
        overlaps=tuple(reached.tolist()),
        num_fallbacks=num_fallbacks,
    )


def match_compiled(logits: FloatArray, row: SamplingRow, work: Work) -> Verdict:
    """Draw the target's own token at each position, as long as the draft agrees; plain decoding without one.

    Args:
        logits: [R, V] float32 of the row.
        row: of no shared noise, its law dense.
        work: overwritten.
    """
    params = row.params
    num_accepted, token = kernels.match_draft(
        logits,
        work.drafts.of(row.draft_tokens),
        params.inverse_temperature,
        params.top_p,
        params.min_p,
        row.seed & _SEED_MASK,
        len(row.history),
        work.weights,
    )
    if token < 0:
        return Verdict(num_accepted=0, next_token=None)
    return Verdict(num_accepted=num_accepted, next_token=token)
