"""The device's kernels on the batches that the host's sampler answers."""

import pytest
from outrider.engines.sampling.noise import CounterNoise

from tests.engines.sampling.chosen_noise import TableNoise
from tests.engines.sampling.mixed_batches import NUM_SEEDS, VOCAB_SIZE, check_mixed_batch
from tests.engines.sampling.test_mixed_batches import MASSES, check_small_residual


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_mixed_batches_are_answered_as_the_oracle_answers_them(seed, loaded):
    check_mixed_batch(loaded(VOCAB_SIZE)[1], seed)


@pytest.mark.parametrize("mass", MASSES)
def test_a_residual_of_a_hundred_thousandth_is_drawn_from(mass, loaded):
    noise = TableNoise()
    switch, sampler = loaded(4)
    switch.source = noise
    try:
        check_small_residual(sampler, noise, mass)
    finally:
        switch.source = CounterNoise()
