"""Noise is a function of its address: seed, purpose, position, round."""

from __future__ import annotations

import numpy as np
import pytest

from engines.noise import CounterNoise, Purpose, exponentials, uniforms

ADDRESS = {"purpose": Purpose.ACCEPT, "position": 5, "round_start": 3, "count": 4}


def test_the_same_address_gives_the_same_numbers_whatever_was_drawn_before():
    noise = CounterNoise()
    first = noise.uniforms(7, **ADDRESS)
    noise.exponentials(1, 2, 33)
    noise.uniforms(9, purpose=Purpose.DRAFT, position=0, round_start=None, count=3)
    assert noise.uniforms(7, **ADDRESS).tolist() == first.tolist()
    assert uniforms(7, **ADDRESS).tolist() == first.tolist()


@pytest.mark.parametrize(
    "change",
    [{"purpose": Purpose.DRAFT}, {"position": 6}, {"round_start": 4}, {"round_start": None}],
)
def test_each_part_of_the_address_changes_the_numbers(change):
    assert not np.isin(uniforms(7, **(ADDRESS | change)), uniforms(7, **ADDRESS)).any()


def test_round_zero_is_not_the_noise_without_a_round():
    addresses = [ADDRESS | {"round_start": start} for start in (0, None)]
    assert uniforms(7, **addresses[0])[0] != uniforms(7, **addresses[1])[0]


@pytest.mark.parametrize("seed", [1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_its_own(seed):
    assert uniforms(seed, **ADDRESS)[0] != uniforms(seed ^ 1, **ADDRESS)[0]


def test_counts_are_prefixes():
    assert uniforms(7, **(ADDRESS | {"count": 2})).tolist() == uniforms(7, **ADDRESS)[:2].tolist()
    assert exponentials(7, 5, 9).tolist() == exponentials(7, 5, 30)[:9].tolist()


def test_kept_races_are_those_drawn_afresh_at_any_size_and_after_any_number_of_others():
    noise = CounterNoise()
    sizes = [5, 9, 4, 9]
    for position in range(3):
        for size in sizes:
            fresh = exponentials(7, position, size)
            assert noise.exponentials(7, position, size).tolist() == fresh.tolist()
    for position in range(40):
        noise.exponentials(8, position, 1 << 18)
    assert sum(len(race) for race in noise._races.values()) == noise._num_kept <= 1 << 23
    for position in range(3000):
        noise.exponentials(9, position, 5)
    assert len(noise._races) == 1024
    assert sum(len(race) for race in noise._races.values()) == noise._num_kept
    assert noise.exponentials(7, 1, 9).tolist() == exponentials(7, 1, 9).tolist()


def test_the_numbers_are_pinned_so_that_a_seed_means_the_same_for_ever():
    philox = np.random.Philox(
        key=np.array([7, Purpose.ACCEPT], dtype=np.uint64),
        counter=np.array([0, 5, 4, 0], dtype=np.uint64),
    )
    expected = (philox.random_raw(4) >> np.uint64(11)) * 2.0**-53
    assert uniforms(7, **ADDRESS).tolist() == expected.tolist()
    assert uniforms(7, **ADDRESS)[0] == 0.38230540418442815


def test_uniforms_fill_the_unit_interval_evenly():
    drawn = np.sort(uniforms(1, **(ADDRESS | {"count": 20_000})))
    assert drawn[0] >= 0.0
    assert drawn[-1] < 1.0
    # Kolmogorov distance above 1.95 / sqrt(n) has probability below .001; the seed is fixed.
    assert abs(drawn - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)


def test_positions_in_a_row_are_independent_uniforms():
    noise = CounterNoise()
    drawn = np.array(
        [
            noise.uniforms(3, purpose=Purpose.MATCH, position=p, round_start=None, count=1)[0]
            for p in range(4000)
        ]
    )
    assert abs(np.sort(drawn) - np.arange(4000) / 4000).max() < 1.95 / np.sqrt(4000)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 3.3 / np.sqrt(4000)


def test_exponentials_are_positive_and_have_their_law():
    drawn = exponentials(3, 8, 20_000)
    assert drawn.dtype == np.float32
    assert (drawn > 0.0).all()
    uniform = np.sort(-np.expm1(-drawn.astype(np.float64)))
    assert abs(uniform - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)
