"""Every sampler answers batches of rows of every kind as the oracle does, and draws from small residuals too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import CounterNoise, Purpose

from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import TableNoise, logits_of
from tests.engines.sampling.mixed_batches import NUM_SEEDS, VOCAB_SIZE, check_mixed_batch

MAX_GAMMA = 4
MASSES = (1e-3, 1e-4, 1e-5)


def host(noise=None, vocab_size=VOCAB_SIZE):
    return CpuSampler(max_batch=4, max_gamma=MAX_GAMMA, vocab_size=vocab_size, noise=noise)


def check_host_by_steps():
    for seed in range(NUM_SEEDS):
        check_mixed_batch(host(CounterNoise()), seed, draws_by_rank=True)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("kind", ["compiled", "by steps"])
def test_mixed_batches_are_answered_as_the_oracle_answers_them(kind, seed):
    noise = CounterNoise() if kind == "by steps" else None
    check_mixed_batch(host(noise), seed, draws_by_rank=True, has_sigma=seed % 2 > 0)


def check_small_residual(sampler, noise, mass):
    """The draft is the target but for ``mass`` at token 0 instead of 1, and its token 1 is rejected."""
    noise.tables = [{(Purpose.ACCEPT, 1): 1.0 - 2.0**-30, (Purpose.RECOVER, 1): 0.9}]
    row = row_for(seed=0)
    noise.tables[0][Purpose.DRAFT, 1] = 0.9
    (token,) = sampler.propose(logits_of([0.5, 0.5, 0.0, 0.0])[None], [row], vocab_size=4)
    assert token == 1
    judged = replace(row, draft_tokens=(1,), is_sampled_draft=True)
    target = logits_of(*[[0.5 + mass, 0.5 - mass, 0.0, 0.0]] * 2)[None]
    (verdict,) = sampler.judge(target, [judged])
    assert (verdict.num_accepted, verdict.next_token, verdict.num_fallbacks) == (0, 0, 0)


@pytest.mark.parametrize("mass", MASSES)
def test_a_residual_of_a_hundred_thousandth_is_drawn_from(mass):
    noise = TableNoise()
    check_small_residual(host(noise, 4), noise, mass)
