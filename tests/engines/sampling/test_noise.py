"""Noise is a function of its address: seed, purpose, position, round."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.engines.sampling.noise import CounterNoise, Purpose

ADDRESS = {"purpose": Purpose.ACCEPT, "position": 5, "round_start": 3}
ROUND_PURPOSES = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER, Purpose.BONUS)


def uniform(seed, **address):
    return CounterNoise().uniform(seed, **address)


def test_the_same_address_gives_the_same_number_whatever_was_drawn_before():
    noise = CounterNoise()
    first = noise.uniform(7, **ADDRESS)
    noise.exponentials(1, 2, 33)
    noise.uniform(9, purpose=Purpose.DRAFT, position=0, round_start=None)
    for position in range(40):
        noise.uniform(9, purpose=Purpose.DRAFT, position=position, round_start=1)
    assert noise.uniform(7, **ADDRESS) == uniform(7, **ADDRESS) == first


def test_no_two_addresses_share_a_number():
    addresses = [
        (seed, purpose, position, start)
        for seed in (0, 1, 7, 2**63, 2**64 - 1)
        for purpose in (*ROUND_PURPOSES, Purpose.MATCH)
        for position in range(40)
        for start in (None, 0, 1, 5)
    ]
    noise = CounterNoise()
    drawn = {
        noise.uniform(seed, purpose=purpose, position=position, round_start=start)
        for seed, purpose, position, start in addresses
    }
    assert len(drawn) == len(addresses)


def test_a_longer_race_begins_with_a_shorter_one():
    assert (
        CounterNoise().exponentials(7, 5, 9).tolist()
        == CounterNoise().exponentials(7, 5, 30)[:9].tolist()
    )


def test_kept_races_are_those_drawn_afresh_at_any_size_and_after_any_number_of_others():
    noise = CounterNoise()
    sizes = [5, 9, 4, 9]
    for position in range(3):
        for size in sizes:
            fresh = CounterNoise().exponentials(7, position, size)
            assert noise.exponentials(7, position, size).tolist() == fresh.tolist()
    for position in range(40):
        noise.exponentials(8, position, 1 << 18)
    assert sum(len(race) for race in noise._races.values()) == noise._num_kept <= 1 << 23
    for position in range(3000):
        noise.exponentials(9, position, 5)
    assert len(noise._races) == 512
    assert sum(len(race) for race in noise._races.values()) == noise._num_kept
    assert noise.exponentials(7, 1, 9).tolist() == CounterNoise().exponentials(7, 1, 9).tolist()


@pytest.mark.parametrize("position", [0, 1, 15, 16, 4097, 2**62])
@pytest.mark.parametrize("seed", [0, 7, 2**63 + 12345, 2**64 - 1])
def test_the_numbers_are_pinned_so_that_a_seed_means_the_same_for_ever(seed, position):
    """One block of Philox a position, its four words in the order of the purposes."""
    for stream, purposes, start in ((1, ROUND_PURPOSES, 3), (5, (Purpose.MATCH,), None)):
        philox = np.random.Philox(
            key=np.array([seed, stream], dtype=np.uint64),
            counter=np.array([position, 0, 0 if start is None else start + 1, 0], dtype=np.uint64),
        )
        expected = (philox.random_raw(4) >> np.uint64(11)) * 2.0**-53
        for purpose, number in zip(purposes, expected, strict=False):
            address = {"purpose": purpose, "position": position, "round_start": start}
            assert uniform(seed, **address) == uniform(seed + 2**64, **address) == number


@pytest.mark.parametrize("index", [0, 3, 4, 4097])
@pytest.mark.parametrize("purpose", [Purpose.CANDIDATE, Purpose.CANDIDATE_COIN])
def test_the_numbers_of_siblings_are_pinned_too(purpose, index):
    """One block of Philox for four siblings."""
    seed, position, start, node = 2**64 - 3, 40, 17, 5
    philox = np.random.Philox(
        key=np.array([seed, purpose], dtype=np.uint64),
        counter=np.array([index // 4, position, start + 1, node], dtype=np.uint64),
    )
    expected = float(philox.random_raw(4)[index % 4] >> np.uint64(11)) * 2.0**-53
    address = {"purpose": purpose, "position": position, "round_start": start, "node": node}
    assert CounterNoise().of_sibling(seed, index=index, **address) == expected


def test_one_number_is_known_by_heart():
    assert uniform(7, **ADDRESS) == 0.004537610779923984


def test_uniforms_fill_the_unit_interval_evenly():
    noise = CounterNoise()
    drawn = np.array(
        [
            noise.uniform(1, purpose=purpose, position=position, round_start=2)
            for position in range(5000)
            for purpose in ROUND_PURPOSES
        ]
    )
    # Kolmogorov distance above 1.95 / sqrt(n) has probability below .001; the seed is fixed.
    assert abs(np.sort(drawn) - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    for purpose in range(1, 4):
        correlation = np.corrcoef(drawn[0::4], drawn[purpose::4])[0, 1]
        assert abs(correlation) < 3.3 / np.sqrt(5000)


def test_positions_in_a_row_are_independent_uniforms():
    noise = CounterNoise()
    drawn = np.array(
        [noise.uniform(3, purpose=Purpose.MATCH, position=p, round_start=None) for p in range(4000)]
    )
    assert abs(np.sort(drawn) - np.arange(4000) / 4000).max() < 1.95 / np.sqrt(4000)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 3.3 / np.sqrt(4000)


def test_exponentials_are_positive_and_have_their_law():
    drawn = CounterNoise().exponentials(3, 8, 20_000)
    assert drawn.dtype == np.float32
    assert (drawn > 0.0).all()
    uniform = np.sort(-np.expm1(-drawn.astype(np.float64)))
    assert abs(uniform - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)
