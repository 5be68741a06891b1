"""Turns the answers of the sampler's kernels into verdicts. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.rows import judgement_rule
from outrider.engines.accelerators.device.sampling.tensors import FRACTION_BITS, Answer, Rule
from outrider.engines.base import EngineError, FloatArray, IntArray
from outrider.engines.sampling.base import SamplingRow, TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Tops:
    """Outputs of ``Stage.TOPS``.

    Attributes:
        logprobs: [B, R] float32, of the emitted tokens.
        ids: [B, R, N] int64, tokens of greatest logit, greatest first, ties by lower id.
        top_logprobs: [B, R, N] float32, theirs.
    """

    logprobs: FloatArray
    ids: IntArray
    top_logprobs: FloatArray


def read_answer(row: SamplingRow, answer: list[int], gamma: int) -> Verdict:
    """The verdict on a draft of ``gamma`` tokens; ``answer`` is a row of ``tensors.ANSWERS``."""
    if not answer[Answer.IS_FINITE]:
        return Verdict(num_accepted=0, next_token=None)
    num_accepted = answer[Answer.NUM_ACCEPTED]
    overlaps: tuple[float, ...] = ()
    if row.is_sampled_draft and judgement_rule(row, gamma) is Rule.RATIO:
        reached = answer[names.NUM_ANSWERS :][: min(num_accepted + 1, gamma)]
        overlaps = tuple(overlap * 2.0**-FRACTION_BITS for overlap in reached)
    return Verdict(
        num_accepted=num_accepted,
        next_token=answer[Answer.NEXT_TOKEN],
        overlaps=overlaps,
        num_fallbacks=answer[Answer.NUM_FALLBACKS],
    )


def add_tops(verdict: Verdict, row: SamplingRow, tops: Tops) -> Verdict:
    """The verdict with what its row asks for of the raw logits.

    Raises:
        EngineError: more entries than the kernel finds.
    """
    most = tops.ids.shape[2]
    if max(row.num_logprobs or 0, row.num_choices) > most:
        raise EngineError(f"the sampler's kernels find the {most} greatest logits at most")
    if verdict.next_token is None:
        return verdict
    if row.num_logprobs is not None:
        columns = range(verdict.num_accepted + 1)
        logprobs = tuple(_logprobs(tops, row.index, column, row.num_logprobs) for column in columns)
        verdict = replace(verdict, logprobs=logprobs)
    if row.num_choices > 0:
        greatest = tops.ids[row.index, : len(row.draft_tokens) + 1, : row.num_choices]
        verdict = replace(verdict, choices=tuple(tuple(ids) for ids in greatest.tolist()))
    return verdict


def _logprobs(tops: Tops, row: int, column: int, num_top: int) -> TokenLogprobs:
    ids = tops.ids[row, column, :num_top].tolist()
    values = tops.top_logprobs[row, column, :num_top].tolist()
    return TokenLogprobs(
        logprob=float(tops.logprobs[row, column]), top=tuple(zip(ids, values, strict=True))
    )
