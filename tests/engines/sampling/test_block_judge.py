"""The CPU sampler's block verification, held to the oracle: its exact law by walking its noise, its worked examples."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.noise import CounterNoise, Purpose
from outrider.runtime.oracle.block import emitted_probs_block
from outrider.runtime.oracle.verification import emitted_probs

from tests.engines.sampling.test_cpu_sampler import (
    HALVES,
    LENIENT,
    MAX_ERROR,
    SEED_STABLE,
    ScriptedCoins,
    judged_law,
    one_round,
    round_law,
    run_of,
)
from tests.runtime.oracle.laws import distance, f4a_draft, f4a_target, random_row_of
from tests.runtime.oracle.test_block import PAIRS


def block_law(draft, target, gamma, **changes):
    return round_law(draft, target, gamma, verifies_block=True, **changes)


@pytest.mark.parametrize("pair", ["F1", "F2", "F4a", "ternary", "equal", "disjoint"])
def test_a_round_of_two_has_the_oracles_law(pair):  # T16
    draft, target = PAIRS[pair]
    expected = emitted_probs_block(draft, target, 2)
    assert distance(block_law(draft, target, 2), expected) < MAX_ERROR


def test_a_round_of_three_has_the_oracles_law():  # T16
    draft, target = PAIRS["binary"]
    assert distance(block_law(draft, target, 3), emitted_probs_block(draft, target, 3)) < MAX_ERROR


def test_laws_with_zeros_have_the_oracles_law():
    draft, target = random_row_of(2, 3, num_zeros=1), random_row_of(52, 3, num_zeros=1)
    assert distance(block_law(draft, target, 2), emitted_probs_block(draft, target, 2)) < MAX_ERROR


@pytest.mark.parametrize("top", [{"top_k": 2}, {"top_p": 0.7}])
def test_truncated_rows_have_the_truncated_laws(top):
    """Sparse laws on both sides, of different ids."""

    def kept(row_of):
        def row(prefix):
            ranked = np.sort(row_of(prefix))[::-1]
            count = 2 if "top_k" in top else int(np.searchsorted(np.cumsum(ranked), 0.7)) + 1
            part = np.where(row_of(prefix) >= ranked[count - 1], row_of(prefix), 0.0)
            return part / part.sum()

        return row

    draft, target = random_row_of(7, 3), random_row_of(57, 3)
    expected = emitted_probs_block(kept(draft), kept(target), 2)
    actual = block_law(draft, target, 2, params=SamplingParams(**top))
    assert distance(actual, expected) < MAX_ERROR


def test_a_temperature_applies_to_draft_and_target_alike():
    def squared(row_of):
        return lambda prefix: row_of(prefix) ** 2 / (row_of(prefix) ** 2).sum()

    expected = emitted_probs_block(squared(f4a_draft), squared(f4a_target), 2)
    actual = block_law(f4a_draft, f4a_target, 2, params=SamplingParams(temperature=0.5))
    assert distance(actual, expected) < MAX_ERROR


def test_penalties_see_the_tokens_drafted_before():
    """Logits 0 penalise nothing; a presence penalty of 2 on a token drafted before divides its weight by e^2."""

    def penalised(prefix):
        row = HALVES * np.exp(-2.0 * np.isin([0, 1], prefix))
        return row / row.sum()

    expected = emitted_probs_block(penalised, penalised, 2)
    actual = block_law(
        lambda _: HALVES, lambda _: HALVES, 2, params=SamplingParams(presence_penalty=2.0)
    )
    assert distance(actual, expected) < MAX_ERROR


@pytest.mark.parametrize("mode", [SEED_STABLE, LENIENT])
def test_other_modes_judge_token_by_token(mode):
    noise = CounterNoise()
    for seed in range(20):
        options = {"mode": mode, "lenience": 0.5 if mode is LENIENT else 1.0, "seed": seed}
        rounds = [
            run_of(
                *one_round(f4a_draft, f4a_target, 3, noise=noise, verifies_block=is_on, **options)
            )
            for is_on in (False, True)
        ]
        assert rounds[0] == rounds[1]


def test_a_point_mass_is_matched_as_ever():
    rows = [f4a_target(()), f4a_target((1,)), f4a_target((1, 0))]
    assert judged_law((1, 0), rows, verifies_block=True) == judged_law((1, 0), rows)


def edge_round(coin, target):
    """A certain draft of one token, judged with one coin."""
    noise = ScriptedCoins(dict.fromkeys(Purpose, 0.0) | {Purpose.ACCEPT: coin})
    sure = np.array([1.0, 0.0])
    row, verdict = one_round(lambda _: sure, lambda _: target, 1, noise=noise, verifies_block=True)
    return run_of(row, verdict)


def test_the_coin_at_the_threshold_itself_rejects():  # T3, T4
    assert edge_round(0.5, HALVES) == (1,)
    assert edge_round(np.nextafter(0.5, 0.0), HALVES) == (0, 0)
    assert edge_round(0.0, np.array([0.0, 1.0])) == (1,)


def test_a_run_too_unlikely_to_divide_by_is_rejected():
    """A run of weight 1e-25 may be kept, and is at coin 0; one of 1e-50 is not even asked about."""
    noise = ScriptedCoins(dict.fromkeys(Purpose, 0.0))
    sure, unlikely = np.array([1.0, 0.0]), np.array([1e-25, 1.0])
    row, verdict = one_round(
        lambda _: sure, lambda _: unlikely, 3, noise=noise, verifies_block=True
    )
    assert run_of(row, verdict) == (0, 1)


def test_rows_that_are_not_finite_end_the_judgement():
    whole = CounterNoise()

    def target(prefix):
        return np.array([np.nan, 1.0]) if prefix else HALVES

    _, verdict = one_round(lambda _: HALVES, target, 2, noise=whole, verifies_block=True)
    assert (verdict.num_accepted, verdict.next_token) == (0, None)


def test_a_bonus_row_is_read_only_behind_the_whole_draft():
    def target(prefix):
        return np.array([np.nan, 1.0]) if len(prefix) == 1 else np.array([0.0, 1.0])

    _, verdict = one_round(
        lambda _: np.array([1.0, 0.0]), target, 1, noise=CounterNoise(), verifies_block=True
    )
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_an_empty_residual_falls_back_to_the_target_and_is_counted():
    noise = ScriptedCoins(dict.fromkeys(Purpose, 0.0) | {Purpose.ACCEPT: 1.0})
    _, verdict = one_round(lambda _: HALVES, lambda _: HALVES, 2, noise=noise, verifies_block=True)
    assert (verdict.num_accepted, verdict.num_fallbacks) == (0, 1)


def test_coins_and_the_next_draw_have_their_own_addresses():
    noise = ScriptedCoins(dict.fromkeys(Purpose, 0.0) | {Purpose.ACCEPT: 0.99})
    draft, target = PAIRS["F2"]
    one_round(draft, target, 2, noise=noise, verifies_block=True)
    judged = noise.addresses[2:]
    assert judged == [
        (Purpose.ACCEPT, 2, 1),
        (Purpose.ACCEPT, 1, 1),
        (Purpose.RECOVER, 1, 1),
    ]


def test_more_tokens_are_kept_than_token_by_token():
    draft, target = PAIRS["F2"]
    block = block_law(draft, target, 2)
    token_wise = emitted_probs(draft, target, 2)
    kept = [sum(m * (len(run) - 1) for run, m in probs.items()) for probs in (block, token_wise)]
    assert kept[0] == pytest.approx(11 / 9, abs=1e-5)
    assert kept[1] == pytest.approx(10 / 9, abs=1e-5)
