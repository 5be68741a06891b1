"""Batches of rows of every kind, answered by a sampler as the oracle answers them.

Answers are compared token for token, at fixed seeds, with a sequential sampler over the oracle's float64 laws: both
have the same noise, and their borders lie within 1e-6 of each other, so a draw would have to fall into that gap to tell
them apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.sampling.base import ExactnessMode, SamplingParams

from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import same
from tests.engines.sampling.reference_sampler import ReferenceSampler

VOCAB_SIZE, NUM_SEEDS = 8, 20
_, SEED_STABLE, _ = ExactnessMode


def mixed_rows(generator, vocab_size, history, *, has_sigma=False):
    """Four rows with sampling parameters of every kind."""
    rows = []
    for index in range(4):
        pick = generator.choice
        params = SamplingParams(
            temperature=float(pick([0.0, 0.7, 1.0, 1.5])),
            top_k=int(pick([0, 3, vocab_size])),
            top_p=float(pick([1.0, 0.6, 0.9])),
            min_p=float(pick([0.0, 0.1])),
            top_n_sigma=float(pick([0.0, 0.0, 1.1])) if has_sigma else 0.0,
            repetition_penalty=float(pick([1.0, 1.3, 0.8])),
            presence_penalty=float(pick([0.0, 0.5])),
            frequency_penalty=float(pick([0.0, 0.3])),
            logit_bias=((1, 2.0), (3, -1.0)) if generator.random() < 0.3 else (),
            allowed_token_ids=(0, 1, 2, 5) if generator.random() < 0.2 else (),
            bad_words=((2,), (int(history[-1]), 1), (1, 1, 3)) if generator.random() < 0.3 else (),
            min_tokens=int(pick([0, 6, 7])),
            end_token_ids=(0,),
        )
        rows.append(
            row_for(
                index=index,
                slot=index,
                params=params,
                mode=list(ExactnessMode)[generator.integers(3)],
                lenience=float(pick([1.0, 0.6])),
                seed=int(generator.integers(2**63)),
                history=history,
                num_prompt=7,
                num_logprobs=3 if generator.random() < 0.3 else None,
            )
        )
    return rows


def drafted_by(sampler, rows, logits, vocab_size):
    drafts = [() for _ in rows]
    for step in logits:
        asked = [replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts, strict=True)]
        tokens = sampler.propose(step, asked, vocab_size=vocab_size)
        drafts = [(*draft, token) for draft, token in zip(drafts, tokens, strict=True)]
    return drafts


def check_mixed_batch(sampler, seed, *, draws_by_rank=False, has_sigma=False):
    """Every third round drafts from the target itself, so that its bonus token is reached.

    ``draws_by_rank`` says that the sampler draws top-k rows by rank, not by id; ``has_sigma`` that it has top_n_sigma.
    """
    generator = np.random.default_rng(seed)
    gamma = seed % 5
    reference = ReferenceSampler(draws_by_rank=draws_by_rank)
    history = generator.integers(0, VOCAB_SIZE, 12)
    rows = mixed_rows(generator, VOCAB_SIZE, history, has_sigma=has_sigma)
    draft_logits = generator.normal(scale=2, size=(gamma, 4, 2, VOCAB_SIZE)).astype(np.float32)
    target_logits = generator.normal(scale=2, size=(4, gamma + 1, VOCAB_SIZE)).astype(np.float32)
    if seed % 3 == 1:
        draft_logits[:, :, 0] = target_logits[:, :gamma].swapaxes(0, 1)
    drafts = drafted_by(sampler, rows, draft_logits, VOCAB_SIZE)
    assert drafts == drafted_by(reference, rows, draft_logits, VOCAB_SIZE)
    judged = [
        replace(
            row,
            draft_tokens=draft,
            is_sampled_draft=gamma > 0
            and seed % 3 > 0
            and not row.params.is_greedy
            and row.mode is not SEED_STABLE,
        )
        for row, draft in zip(rows, drafts, strict=True)
    ]
    verdicts = sampler.judge(target_logits, judged)
    for verdict, expected in zip(verdicts, reference.judge(target_logits, judged), strict=True):
        assert same(verdict, expected)
    # Alone, a row may be served by another graph or kernel. Its answer has the same bits; graphs round
    # log-probabilities by their place in the batch.
    for verdict, row in zip(verdicts, judged, strict=True):
        (alone,) = sampler.judge(target_logits, [row])
        assert replace(alone, logprobs=verdict.logprobs) == verdict
        for found, known in zip(alone.logprobs, verdict.logprobs, strict=True):
            assert found.logprob == pytest.approx(known.logprob, abs=1e-6)
            assert [token for token, _ in found.top] == [token for token, _ in known.top]
    assert sampler.judge(target_logits, judged[::-1]) == verdicts[::-1]
