"""Requests: those of a group differ by their seeds, which are derived once and for ever."""

from __future__ import annotations

from outrider.engines.sampling import philox
from outrider.engines.sampling.noise import Purpose
from outrider.runtime.core.params import SAMPLE_STREAM, sample_seed

from tests.runtime.markov import spec


def test_the_first_has_the_seed_of_the_group_and_the_others_seeds_of_their_own() -> None:
    assert sample_seed(7, 0) == 7
    assert [sample_seed(7, index) for index in (1, 2, 15)] == [
        17007871903393693302,
        17157306759242601542,
        11112900278698673046,
    ]
    assert sample_seed(2**64 - 1, 1) == 1869939434896524398
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(16)}
    assert len(seeds) == 800 and max(seeds) < 2**64


def test_derived_seeds_are_words_of_the_generator_of_all_noise() -> None:
    """The compiled generator gives the upper 53 bits of a word."""
    for seed, index in ((7, 3), (2**64 - 1, 1), (0, 15)):
        share = philox.number(seed, SAMPLE_STREAM, 0, index, 0, 0, 0)
        assert sample_seed(seed, index) >> 11 == int(share * 2**53)
    used = {philox.ROUND_STREAM, philox.MATCH_STREAM, philox.RACE_STREAM, *map(int, Purpose)}
    assert SAMPLE_STREAM not in used


def test_requests_of_a_group_are_the_same_but_for_seed_and_name() -> None:
    group = spec("a", num_samples=3, seed=7)
    first, second, third = group.samples()
    assert first is group
    assert [one.sample for one in (first, second, third)] == [0, 1, 2]
    assert len({one.internal_id for one in (first, second, third)}) == 3
    assert (second.request_id, third.seed) == ("a", sample_seed(7, 2))
    assert spec("b").samples() == (spec("b"),)
