"""Where engines pack rows, each further token has a price of its own, and what is chosen is the best there is."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.core.controller import Controller, StepKind
from runtime.core.forecast import Batch, Forecaster, Settings
from runtime.core.packed_loops import PART
from tests.core.numpy_packed import NumpyPacked
from tests.core.test_choice_loops import MAX_GAMMA, SHARED, random_batch, random_table
from tests.core.test_controller import batch, table

SETTINGS = Settings()


@pytest.mark.parametrize("seed", range(8))
def test_what_every_longest_draft_brings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = random_table(rng)
    forecaster = Forecaster(
        costs,
        max_gamma=MAX_GAMMA,
        max_shared_missing=SHARED,
        settings=SETTINGS,
        packs_rows=True,
    )
    num_ragged = 0
    for _ in range(60):
        rows, scales = random_batch(rng), rng.uniform(0.7, 1.4, MAX_GAMMA + 1)
        found = forecaster.forecast(rows, scales)
        expected = NumpyPacked(costs, rows, scales, shared=SHARED, horizon=SETTINGS.horizon)
        assert found.floor == expected.floor
        np.testing.assert_array_equal(found.gammas, expected.gammas)
        for name in ("tokens", "seconds", "table_s", "fixed", "plain_tokens", "plain_table_s"):
            np.testing.assert_allclose(
                getattr(found, name), getattr(expected, name), rtol=1e-12, err_msg=name
            )
        gammas = found.gammas[int(found.rates.argmax())]
        num_ragged += len(set(gammas[~expected.batch.is_fixed].tolist())) > 1
        drafted = tuple((row, int(gamma)) for row, gamma in enumerate(gammas) if gamma)
        assert found.packed is not None
        assert found.packed.table_s(drafted) == pytest.approx(expected.seconds_of(gammas))
    assert num_ragged > 10


def packed(costs: object, **settings: object) -> Forecaster:
    return Forecaster(
        costs,
        max_gamma=MAX_GAMMA,
        max_shared_missing=SHARED,
        settings=Settings(**settings),
        packs_rows=True,
    )


def first_choice(forecaster: Forecaster, rows: Batch) -> list[int]:
    one = Controller(forecaster, max_gamma=MAX_GAMMA, settings=SETTINGS)
    one.decide(rows)
    return one.next_step()[0]


def test_a_row_that_is_unlikely_to_be_kept_does_not_ride_along() -> None:
    costs = table(c=0.01, slope=0.3)
    rows = batch(0.95, 0.02, 0.02, 0.02)
    wide = Forecaster(costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS)
    ragged = first_choice(packed(costs), rows)
    assert ragged[0] >= 3
    assert ragged[1:] == [0, 0, 0]
    # As wide as the widest, the call would cost them all the same.
    assert first_choice(wide, rows)[0] < ragged[0]


def test_a_row_whose_drafts_fare_worse_is_not_left_behind() -> None:
    """It would end last, alone: its first token does not bring its price, but a good part of it."""
    costs = table(c=0.01, slope=0.4)
    rows = batch(0.9, 0.9, 0.9, 0.3)
    forecast = packed(costs).forecast(rows, np.ones(MAX_GAMMA + 1))
    price = NumpyPacked(costs, rows, np.ones(MAX_GAMMA + 1), shared=SHARED, horizon=64).mean_s[3]
    assert 0.3 < price * forecast.rates.max() < 0.3 / PART
    assert first_choice(packed(costs), rows)[3] >= 1


@pytest.mark.parametrize("num_remaining", [10, 40])
def test_the_steps_left_pay_for_catching_up_in_all(num_remaining: int) -> None:
    """Drafts that bring many tokens leave few steps to pay."""
    costs = table(c=0.02, catch_up_s=0.01)
    wide = Forecaster(costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS)
    left = {"num_remaining": np.array([num_remaining])}
    for forecaster in (packed(costs), wide):
        one, other = (
            forecaster.forecast(
                batch(0.97, **left, num_missing=np.array([n])), np.ones(MAX_GAMMA + 1)
            )
            for n in (100, 1)
        )
        assert (one.gammas == other.gammas).all()
        num_steps = num_remaining / one.tokens[1:]
        caught_up_s = (one.table_s - other.table_s)[1:] * num_steps
        assert caught_up_s == pytest.approx(np.full(MAX_GAMMA, 99 * 0.01))


def test_one_row_is_priced_alike_either_way() -> None:
    costs = table(c=0.1, slope=0.2, token_s=0.01)
    wide = Forecaster(costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS)
    for alpha in (0.2, 0.5, 0.8, 0.95):
        rows, scales = batch(alpha), np.ones(MAX_GAMMA + 1)
        one, other = packed(costs).forecast(rows, scales), wide.forecast(rows, scales)
        assert one.rates.max() == pytest.approx(other.rates.max(), rel=1e-12)
        assert one.fixed == pytest.approx(other.fixed, rel=1e-12)


def test_a_choice_of_other_times_is_learnt_from_by_what_its_own_drafts_cost() -> None:
    """Half of the tokens asked for were proposed: a step of their time shows that the table is right."""
    costs = table(c=0.05, slope=0.3)
    one = Controller(packed(costs), max_gamma=MAX_GAMMA, settings=SETTINGS)
    rows = batch(0.97, 0.95, 0.95, 0.95)
    one.decide(rows)
    gammas, _ = one.next_step()
    assert min(gammas) >= 2
    prices = one._decision.forecast.packed
    drafted = tuple((row, gamma // 2) for row, gamma in enumerate(gammas))
    seconds = prices.table_s(drafted)
    assert seconds < 0.9 * prices.table_s(tuple(enumerate(gammas)))
    longest = max(length for _, length in drafted)
    for _ in range(40):
        one.observe(1.0, 0, 4, StepKind.PROBE)
        one.observe(seconds, longest, 8, StepKind.GAIN, drafted=drafted)
    assert one.scales == pytest.approx(np.ones(MAX_GAMMA + 1), abs=0.02)


def test_rows_that_joined_since_are_left_out_of_the_price() -> None:
    rows = batch(0.9, 0.9)
    prices = packed(table()).forecast(rows, np.ones(MAX_GAMMA + 1)).packed
    assert prices.table_s(((0, 2), (5, 8))) == prices.table_s(((0, 2),))


def test_rows_of_a_fixed_gamma_are_the_plain_step() -> None:
    rows = batch(0.9, 0.05, caps=(4, 0), fixed=(True, False))
    found = packed(table(c=0.1, slope=0.4)).forecast(rows, np.ones(MAX_GAMMA + 1))
    assert found.floor == 4
    assert found.gammas[4].tolist() == [4, 0]
    assert found.plain_table_s == pytest.approx(found.table_s[4])
