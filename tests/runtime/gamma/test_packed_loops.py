"""Where engines pack rows, each further token has a price of its own, and what is chosen is the best there is."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma import packed_loops
from outrider.runtime.gamma.controller import Controller, StepKind
from outrider.runtime.gamma.forecast import Batch, Forecaster, Settings
from outrider.runtime.gamma.packed_loops import PART

from tests.mutants import put_in_loops
from tests.runtime.gamma.numpy_packed import NumpyPacked
from tests.runtime.gamma.test_choice_loops import MAX_GAMMA, SHARED, random_batch, random_table
from tests.runtime.gamma.test_controller import batch, table

SETTINGS = Settings()


def proposing_less(rng: np.random.Generator, rows: Batch) -> Batch:
    """The batch with drafters that propose less than they are asked for."""
    proposed = np.cumprod(rng.uniform(0.3, 1.0, rows.survival.shape), axis=1)
    called = proposed * rng.choice([0.0, 0.4, 1.0], (rows.num_live, 1))
    return rows._replace(survival=rows.survival * proposed, shares=np.stack([proposed, called]))


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
        if rng.random() < 0.6:
            rows = proposing_less(rng, rows)
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
        drafted = [
            (row, int(gamma), int(rng.integers(gamma + 1))) for row, gamma in enumerate(gammas)
        ]
        num_calling = sum(np.arange(MAX_GAMMA) < calls for *_, calls in drafted)
        assert found.packed is not None
        known_s = found.packed.table_s(tuple(one for one in drafted if one[1]))
        assert known_s == pytest.approx(expected.seconds_for(gammas, num_calling))
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
    oracle = NumpyPacked(costs, rows, np.ones(MAX_GAMMA + 1), shared=SHARED, horizon=64)
    price = sum(one[3] for one in oracle.mean_s)
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
    drafted = tuple((row, gamma // 2, gamma // 2) for row, gamma in enumerate(gammas))
    seconds = prices.table_s(drafted)
    assert seconds < 0.9 * prices.table_s(tuple((row, one, one) for row, one in enumerate(gammas)))
    longest = max(length for _, length, _ in drafted)
    for _ in range(40):
        one.observe(1.0, 0, 4, StepKind.PROBE)
        one.observe(seconds, longest, 8, StepKind.GAIN, drafted=drafted)
    assert one.scales == pytest.approx(np.ones(MAX_GAMMA + 1), abs=0.02)


def test_rows_that_joined_since_are_left_out_of_the_price() -> None:
    rows = batch(0.9, 0.9)
    prices = packed(table()).forecast(rows, np.ones(MAX_GAMMA + 1)).packed
    assert prices.table_s(((0, 2, 2), (5, 8, 8))) == prices.table_s(((0, 2, 2),))


def test_rows_of_a_fixed_gamma_are_the_plain_step() -> None:
    rows = batch(0.9, 0.05, caps=(4, 0), fixed=(True, False))
    found = packed(table(c=0.1, slope=0.4)).forecast(rows, np.ones(MAX_GAMMA + 1))
    assert found.floor == 4
    assert found.gammas[4].tolist() == [4, 0]
    assert found.plain_table_s == pytest.approx(found.table_s[4])


MOST = 4
"""Tokens of the drafts that are enumerated."""


def enumerated(seed: int) -> list[tuple[float, int, int, int]]:
    """Chance, length, calls and kept tokens of everything that a drafter asked for ``MOST`` may propose."""
    rng = np.random.default_rng(seed)
    ways = [
        (length, calls, kept)
        for length in range(MOST + 1)
        for calls in {0, min(length, 2), length}
        for kept in range(length + 1)
    ]
    chances = rng.dirichlet(np.full(len(ways), 0.3))
    return [(float(chance), *way) for chance, way in zip(chances, ways, strict=True)]


def one_row(ways: list[tuple[float, int, int, int]]) -> Batch:
    chances, *columns = (np.array(one) for one in zip(*ways, strict=True))
    positions = np.arange(MAX_GAMMA)
    proposed, called, kept = (chances @ (one[:, None] > positions) for one in columns)
    return batch(0.5, caps=(MOST,))._replace(
        survival=kept[None], shares=np.stack([proposed[None], called[None]])
    )


SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_is_priced_by_all_that_may_be_proposed_and_kept(seed: int) -> None:
    """Costs are linear in tokens, so that the mean over every draft is the price of the mean draft."""
    ways, ones = enumerated(seed), np.ones(MAX_GAMMA + 1)
    costs = table(c=0.1, slope=0.2, token_s=0.01)
    found = packed(costs).forecast(one_row(ways), ones)
    assert found.packed is not None
    for gamma in range(MOST + 1):
        tokens = seconds = 0.0
        for chance, length, calls, kept in ways:
            length, calls, kept = (min(one, gamma) for one in (length, calls, kept))
            drafted = ((0, length, calls),) if length else ()
            tokens += chance * (1 + kept)
            seconds += chance * found.packed.table_s(drafted)
        assert found.fixed[:, gamma] == pytest.approx([tokens, seconds], rel=1e-12)


@pytest.mark.parametrize(
    ("kept", "proposed", "gammas"),
    [
        # Few are long, but of those that are all is kept: what a draft model of few tokens proposes does not hide them.
        ([0.7, 0.5, 0.015, 0.09, 0.09], [1.0, 1.0, 0.1, 0.1, 0.1], [0, 1, 2, 2, 4, 5]),
        # The last ones would pay for themselves, and not for the one before them.
        ([0.7, 0.5, 0.011, 0.008, 0.0], [1.0, 1.0, 0.1, 0.04, 0.04], [0, 1, 2, 2, 2, 2]),
    ],
)
def test_later_positions_may_make_up_for_one_that_does_not_pay(
    kept: list[float], proposed: list[float], gammas: list[int]
) -> None:
    rows = batch(0.5, caps=(5,), uses_model=False)
    rows.survival[0, :5], rows.shares[0, 0, :5] = kept, proposed
    found = packed(table(c=0.0, slope=0.7)).forecast(rows, np.ones(MAX_GAMMA + 1))
    assert found.gammas[:6, 0].tolist() == gammas


def test_a_drafter_that_never_proposes_is_never_asked_to_pay() -> None:
    rows = batch(0.9, 0.9)
    silent = rows._replace(survival=0.0 * rows.survival, shares=0.0 * rows.shares)
    found = packed(table(c=0.3, slope=0.5)).forecast(silent, np.ones(MAX_GAMMA + 1))
    assert found.fixed[0].tolist() == [2.0] * (MAX_GAMMA + 1)
    assert found.fixed[1] == pytest.approx(np.full(MAX_GAMMA + 1, found.fixed[1, 0]), rel=1e-12)
    assert first_choice(packed(table()), silent) == [0, 0]


MUTANTS = {
    "what is asked for counts as proposed": (
        "proposed += shares[PROPOSED, i, j]",
        "proposed += 1.0",
    ),
    "every draft token calls the draft model": (
        "num_calling[j] += shares[CALLED, i, j]",
        "num_calling[j] += 1.0",
    ),
    "part of a token costs nothing": ("if part <= 0.0:", "if part < 1.0:"),
    "a position is held against its whole price": (
        "shares[PROPOSED, i, j] * mean_s[0, i]",
        "mean_s[0, i]",
    ),
    "the draft model is held to be called for all": (
        "shares[CALLED, i, j] * mean_s[1, i]",
        "mean_s[1, i]",
    ),
    "later positions make up for nothing": (
        "gammas[i], kept, spent = j + 1, 0.0, 0.0",
        "gammas[i], kept, spent = j + 1, 0.0, 0.0\n            else:\n                break",
    ),
    "what did not pay is forgotten": (
        "gammas[i], kept, spent = j + 1, 0.0, 0.0",
        "gammas[i] = j + 1\n            kept, spent = 0.0, 0.0",
    ),
}


def every_choice() -> None:
    for seed in range(8):
        test_what_every_longest_draft_brings(seed)
    for mark in test_later_positions_may_make_up_for_one_that_does_not_pay.pytestmark:
        for case in mark.args[1]:
            test_later_positions_may_make_up_for_one_that_does_not_pay(*case)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_price_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    every_choice()
    put_in_loops(monkeypatch, packed_loops, *MUTANTS[name])
    with pytest.raises(AssertionError):
        every_choice()
