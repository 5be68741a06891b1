"""The sampler of CPU engines: draws draft tokens and judges drafts with compiled loops over the logits where they lie.

Knows neither requests nor engines. Rows are adjusted one at a time and only as far as the judgement gets, so a
rejection at the first position costs one softmax. Rows whose distribution covers the whole vocabulary, unmasked, are
proposed and judged in one compiled call each (``engines.sampling.row_kernels``). All others take steps in Python over
the same kernels; the answers are the same bit for bit. The exactness of the output rests on these invariants:

* J1  A draft row kept by ``propose`` is the distribution the draft token was drawn from, bit for bit.
* J2  The target row at draft position i is adjusted with the history plus the first i draft tokens.
* J3  Every token emitted by a judgement has a positive probability in its adjusted target row (mode lenient excepted).
* J4  A row of logits that is not finite stops its own judgement and touches no other.

Source: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1 and appendix A.5; p is the target row, q the draft row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.base import FloatArray
from outrider.engines.buffers import TokenArrays
from outrider.engines.sampling.adjust import adjusted_token_probs, greatest_token, logits_at
from outrider.engines.sampling.base import (
    MAX_BEHIND,
    CandidateNode,
    ExactnessMode,
    SamplingRow,
    Verdict,
    are_plain_greedy,
)
from outrider.engines.sampling.block_judge import BlockDraft, judge_block
from outrider.engines.sampling.candidates import RowCandidates
from outrider.engines.sampling.compiled_rows import (
    GreedyRows,
    Work,
    judge_compiled,
    match_compiled,
    propose_compiled,
)
from outrider.engines.sampling.draws import choices_of, in_place, raw_logprobs
from outrider.engines.sampling.noise import CounterNoise, NoiseSource, Purpose
from outrider.engines.sampling.token_probs import (
    DraftProbs,
    TokenProbs,
    judge_token,
    point_mass,
)


class CpuSampler:
    """Implements ``engines.sampling.base.CandidateSampler`` on the host.

    Not thread-safe: the thread that owns the engines owns it.

    Args:
        max_batch: slots, an upper bound of ``SamplingRow.slot``.
        max_gamma: draft tokens of a row at most, and ``MAX_BEHIND`` point masses behind them.
        vocab_size: V of the target.
        noise: where random numbers come from, one at a time; None for those of production, which compiled calls make
            themselves.
    """

    def __init__(
        self, *, max_batch: int, max_gamma: int, vocab_size: int, noise: NoiseSource | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._noise: NoiseSource = CounterNoise() if noise is None else noise
        self._target_row: FloatArray = np.zeros(vocab_size, dtype=np.float32)
        self._scratch: FloatArray = np.zeros(vocab_size, dtype=np.float32)
        longest = max_gamma + MAX_BEHIND
        self._work = Work(
            self._target_row, self._scratch, np.zeros(max_gamma), TokenArrays(longest)
        )
        self._greedy = GreedyRows(max_batch, longest)
        self._is_compiled = noise is None
        # [max_gamma, V] float32 each, allocated when the slot first drafts: 64 slots of 8 rows of a large vocabulary
        # are 300 MB that greedy and retrieved drafts never need.
        self._draft_shape = (max_gamma, vocab_size)
        self._kept: list[DraftProbs | None] = [None] * max_batch
        self._candidates = RowCandidates(self._noise, max_batch, vocab_size)

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Draw one draft token per row; see ``engines.sampling.base.Sampler``.

        A draft row that is not finite proposes token 0 as a point mass: a poor draft, and still an exact one.
        """
        logits = in_place(logits)
        if are_plain_greedy(rows):
            return self._greedy.propose(logits, rows, vocab_size=vocab_size)
        return [self._propose_row(logits[row.index, 0, :vocab_size], row) for row in rows]

    def propose_children(
        self, logits: FloatArray, points: Sequence[CandidateNode], *, vocab_size: int
    ) -> list[tuple[int, ...]]:
        """Draw the children of some nodes; see ``engines.sampling.base.CandidateSampler``.

        A draft row that is not finite proposes token 0 as a point mass, as in ``propose``.
        """
        logits = in_place(logits)
        return [
            self._candidates.draw(logits[point.row.index, point.column, :vocab_size], point)
            for point in points
        ]

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge whole drafts; see ``engines.sampling.base.Sampler``."""
        logits = in_place(logits)
        if are_plain_greedy(rows):
            verdicts = self._greedy.judge(logits, rows)
        else:
            verdicts = [self._judge_row(logits[row.index], row) for row in rows]
        for at, row in enumerate(rows):
            if row.num_logprobs is not None or row.num_choices:
                here = logits[row.index]
                verdicts[at] = _with_choices(_with_logprobs(verdicts[at], here, row), here, row)
        return verdicts

    def _propose_row(self, logits: FloatArray, row: SamplingRow) -> int:
        num_drafted = len(row.draft_tokens)
        if row.params.is_greedy:
            return greatest_token(logits_at(logits, row, num_drafted)) or 0
        position = len(row.history) + num_drafted
        if row.mode is ExactnessMode.SEED_STABLE:
            probs = adjusted_token_probs(
                logits_at(logits, row, num_drafted), row.params, self._target_row
            )
            return 0 if probs is None else self._race(probs, row, position, len(logits))
        kept = self._kept[row.slot]
        if kept is None:
            kept = self._kept[row.slot] = DraftProbs(*self._draft_shape)
        if self._is_compiled and row.params.is_dense and row.masks is None:
            kept.keep(num_drafted, None)
            return propose_compiled(logits, row, kept)
        probs = adjusted_token_probs(
            logits_at(logits, row, num_drafted), row.params, kept.rows[num_drafted]
        )
        probs = point_mass(0) if probs is None else probs
        kept.keep(num_drafted, probs)
        return probs.draw(self._uniform(row, Purpose.DRAFT, position))

    def _judge_row(self, logits: FloatArray, row: SamplingRow) -> Verdict:
        is_lenient = row.mode is ExactnessMode.LENIENT and row.lenience != 1.0
        if row.candidates is not None:
            return self._candidates.judge(logits, row, row.lenience if is_lenient else 1.0)
        if row.params.is_greedy:
            return self._judge_greedy(logits, row, row.lenience if is_lenient else 1.0)
        is_compiled = self._is_compiled and row.params.is_dense and row.masks is None
        is_race = row.mode is ExactnessMode.SEED_STABLE
        if is_race or not row.draft_tokens or not (row.is_sampled_draft or is_lenient):
            if is_compiled and not is_race:
                return match_compiled(logits, row, self._work)
            return self._judge_by_match(logits, row)
        if row.verifies_block and row.mode is ExactnessMode.MAX_ACCEPT:
            return self._judge_block(logits, row)
        lenience = row.lenience if is_lenient else 1.0
        if is_compiled and row.is_sampled_draft:
            return judge_compiled(logits, row, self._kept_of(row), lenience, self._work)
        return self._judge_by_ratio(logits, row, lenience)

    def _judge_greedy(self, logits: FloatArray, row: SamplingRow, lenience: float) -> Verdict:
        """Keep draft tokens that are the greatest, or at lenience l have l times its probability (A.5)."""
        for index in range(len(row.draft_tokens) + 1):
            processed = logits_at(logits[index], row, index)
            best = greatest_token(processed)
            if best is None:
                return _without_probs(logits[index])
            if index == len(row.draft_tokens):
                break
            token = row.draft_tokens[index]
            if token == best:
                continue
            if lenience == 1.0 or not _is_token(token, len(processed)):
                break
            ratio = np.exp(np.float64(processed[token]) - np.float64(processed[best]))
            if not ratio >= lenience:
                break
        return Verdict(num_accepted=index, next_token=best)

    def _judge_by_match(self, logits: FloatArray, row: SamplingRow) -> Verdict:
        """Draw the target's own token at each position and keep the draft as long as it agrees.

        The token is drawn once per position and emitted at the first disagreement, so the draft never influences what
        is emitted: exact whatever the draft was drawn from.
        """
        start = len(row.history)
        for index in range(len(row.draft_tokens) + 1):
            probs = adjusted_token_probs(
                logits_at(logits[index], row, index), row.params, self._target_row
            )
            if probs is None:
                return _without_probs(logits[index])
            drawn = self._target_token(probs, row, start + index)
            if index == len(row.draft_tokens) or drawn != row.draft_tokens[index]:
                break
        return Verdict(num_accepted=index, next_token=drawn)

    def _judge_by_ratio(self, logits: FloatArray, row: SamplingRow, lenience: float) -> Verdict:
        """Judge the draft token by token (``token_probs.judge_token``), up to the first rejection."""
        start = len(row.history)
        overlaps: list[float] = []
        for index, token in enumerate(row.draft_tokens):
            target = adjusted_token_probs(
                logits_at(logits[index], row, index), row.params, self._target_row
            )
            if target is None:
                return _without_probs(logits[index])
            draft = self._draft_probs(row, index)
            coin = self._uniform(row, Purpose.ACCEPT, start + index)
            judged = judge_token(target, draft, token, coin, lenience, self._scratch)
            if row.is_sampled_draft:
                overlaps.append(judged.overlap)
            if judged.is_kept:
                continue
            return Verdict(
                num_accepted=index,
                next_token=judged.left.draw(self._uniform(row, Purpose.RECOVER, start + index)),
                overlaps=tuple(overlaps),
                num_fallbacks=int(judged.is_fallback),
            )
        gamma = len(row.draft_tokens)
        target = adjusted_token_probs(
            logits_at(logits[gamma], row, gamma), row.params, self._target_row
        )
        if target is None:
            return _without_probs(logits[gamma])
        next_token = target.draw(self._uniform(row, Purpose.BONUS, start + gamma))
        return Verdict(num_accepted=gamma, next_token=next_token, overlaps=tuple(overlaps))

    def _judge_block(self, logits: FloatArray, row: SamplingRow) -> Verdict:
        """Judge the draft as a whole; see ``engines.sampling.block_judge``."""

        def target_at(index: int) -> TokenProbs | None:
            return adjusted_token_probs(
                logits_at(logits[index], row, index), row.params, self._target_row
            )

        draft = BlockDraft(
            tokens=row.draft_tokens,
            target_at=target_at,
            is_finite_at=lambda index: greatest_token(logits[index]) is not None,
            draft_at=lambda index: self._draft_probs(row, index),
            uniform=lambda purpose, index: self._uniform(row, purpose, len(row.history) + index),
            scratch=self._scratch,
        )
        return judge_block(draft)

    def _draft_probs(self, row: SamplingRow, index: int) -> TokenProbs:
        """Return the distribution of draft token ``index``: the kept one (J1), or a point mass."""
        if not row.is_sampled_draft:
            token = row.draft_tokens[index]
            return point_mass(token if _is_token(token, self._vocab_size) else None)
        return self._kept_of(row).probs_at(index)

    def _kept_of(self, row: SamplingRow) -> DraftProbs:
        kept = self._kept[row.slot]
        assert kept is not None, "a sampled draft was proposed by this sampler"
        return kept

    def _target_token(self, probs: TokenProbs, row: SamplingRow, position: int) -> int:
        if row.mode is ExactnessMode.SEED_STABLE:
            return self._race(probs, row, position, self._vocab_size)
        return probs.draw(
            self._noise.uniform(
                row.seed, purpose=Purpose.MATCH, position=position, round_start=None
            )
        )

    def _race(self, probs: TokenProbs, row: SamplingRow, position: int, vocab_size: int) -> int:
        return probs.race(self._noise.exponentials(row.seed, position, vocab_size))

    def _uniform(self, row: SamplingRow, purpose: Purpose, position: int) -> float:
        return self._noise.uniform(
            row.seed, purpose=purpose, position=position, round_start=len(row.history)
        )


def _is_token(token: int, vocab_size: int) -> bool:
    return 0 <= token < vocab_size


def _without_probs(logits: FloatArray) -> Verdict:
    """Return the verdict where a row of logits [V] leaves no probabilities: not finite, or every token is banned."""
    return Verdict(num_accepted=0, next_token=None, has_conflict=greatest_token(logits) is not None)


def _with_logprobs(verdict: Verdict, logits: FloatArray, row: SamplingRow) -> Verdict:
    """The verdict with the raw log-probabilities of its emitted tokens, where the row asks for them."""
    if row.num_logprobs is None or verdict.next_token is None:
        return verdict
    kept = range(1, verdict.num_accepted + 1) if row.candidates is None else verdict.path
    emitted = (*(row.draft_tokens[node - 1] for node in kept), verdict.next_token)
    return replace(
        verdict,
        logprobs=tuple(
            raw_logprobs(logits[node], token, row.num_logprobs)
            for node, token in zip((0, *kept), emitted, strict=True)
        ),
    )


def _with_choices(verdict: Verdict, logits: FloatArray, row: SamplingRow) -> Verdict:
    """The verdict with the greatest tokens of every column, where the row asks for them."""
    if row.num_choices == 0 or verdict.next_token is None:
        return verdict
    columns = logits[: len(row.draft_tokens) + 1]
    return replace(verdict, choices=choices_of(columns, row.num_choices))
