"""The compiled loops of a decision give the numbers of the formulas, on whatever they are given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from outrider.runtime.gamma.acceptance import AcceptanceBook, Round
from outrider.runtime.gamma.costs import CostTable, HostCosts, ModelCosts, RowCosts, RowKind
from outrider.runtime.gamma.decision import best_longest
from outrider.runtime.gamma.forecast import KINDS, Batch, Forecaster, Settings
from outrider.runtime.gamma.step_times import StepTimes
from outrider.runtime.gamma.trials import plan_exploration, plan_finding

from tests.runtime.gamma.numpy_choice import (
    NumpyBook,
    NumpyFilter,
    NumpyForecast,
    exploration,
    feeding_s,
)
from tests.runtime.gamma.test_step_times import doubt

MAX_GAMMA, SHARED = 8, 2
SETTINGS = Settings()


def random_costs(rng: np.random.Generator, *, batches: tuple[int, ...], scale: float) -> ModelCosts:
    tokens = (1, 2, 5, 9, 64)
    grid = np.cumsum(rng.uniform(0.0, scale, (len(batches), len(tokens))), axis=0)
    return ModelCosts(
        batches=batches,
        tokens=tokens,
        seconds=tuple(map(tuple, (scale + np.cumsum(grid, axis=1)).tolist())),
        capacity=128,
        position_s=float(rng.uniform(0.0, 1e-3 * scale)),
    )


def random_table(rng: np.random.Generator) -> CostTable:
    rows = {
        kind: RowCosts(row_s=rng.uniform(0.0, 1e-4), token_s=rng.uniform(0.0, 3e-4))
        for kind in RowKind
    }
    return CostTable(
        target=random_costs(rng, batches=(1, 4, 16), scale=2e-3),
        draft=random_costs(rng, batches=(1, 4, 16), scale=2e-4),
        catch_up=random_costs(rng, batches=(1,), scale=3e-4),
        host=HostCosts(step_s=1e-4, call_s=2e-5, rows=rows),
        capacities=(128, 512, 2048),
    )


def random_batch(rng: np.random.Generator) -> Batch:
    n = int(rng.integers(1, 9))
    facts = (
        rng.choice([MAX_GAMMA, MAX_GAMMA, 3, 1, 0], n),
        rng.random(n) < rng.choice([0.0, 0.3]),
        rng.random(n) < 0.8,
        rng.integers(0, len(KINDS), n),
        rng.choice([0, 1, 2, 3, 20, 90], n),
        rng.choice([1, 5, 40, 300], n),
    )
    return Batch(
        np.array(facts, dtype=np.int64),
        survival=np.cumprod(rng.uniform(0.1, 1.0, (n, MAX_GAMMA)), axis=1),
        shares=np.ones((2, n, MAX_GAMMA)),
        num_cached=int(rng.integers(1, 600)),
        time_left_s=float(rng.uniform(1e-3, 2e-2)) if rng.random() < 0.3 else math.inf,
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_every_longest_draft_brings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = random_table(rng)
    forecaster = Forecaster(
        costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS
    )
    num_drafting = 0
    for _ in range(60):
        batch, scales = random_batch(rng), rng.uniform(0.7, 1.4, MAX_GAMMA + 1)
        found = forecaster.forecast(batch, scales)
        expected = NumpyForecast(costs, batch, scales, shared=SHARED, horizon=SETTINGS.horizon)
        assert found.floor == expected.floor
        np.testing.assert_array_equal(found.gammas, expected.gammas)
        for name in ("tokens", "seconds", "table_s", "fixed", "plain_tokens"):
            np.testing.assert_allclose(
                getattr(found, name), getattr(expected, name), rtol=1e-12, err_msg=name
            )
        in_use = None if rng.random() < 0.3 else int(rng.integers(0, MAX_GAMMA + 1))
        best = best_longest(found, in_use, SETTINGS)
        assert best == expected.best(in_use, SETTINGS.lead, SETTINGS.margin)
        num_drafting += best > 0
    assert 10 < num_drafting < 60


def test_a_trial_is_of_the_longest_draft_with_the_best_hope() -> None:
    rng = np.random.default_rng(3)
    costs = random_table(rng)
    forecaster = Forecaster(
        costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS
    )
    times = StepTimes(max_gamma=MAX_GAMMA, spread=0.05)
    times.learn(1, [(3, [1.0] * 20)])
    others, distances = set(), set()
    for _ in range(60):
        batch = random_batch(rng)._replace(time_left_s=math.inf)
        ratios = rng.uniform(0.9, 1.1, (2, 12)).tolist()
        times.learn(batch.num_live, list(zip(rng.integers(0, 9, 2).tolist(), ratios, strict=True)))
        scales = times.scales(batch.num_live)
        found = forecaster.forecast(batch, scales)
        expected = NumpyForecast(costs, batch, scales, shared=SHARED, horizon=SETTINGS.horizon)
        best = best_longest(found, None, SETTINGS)
        if best:
            other = expected.other(doubt(times, batch.num_live, best), best, SETTINGS.margin)
            covariance = times.covariance(batch.num_live)
            trial, distance = plan_finding(found, covariance, SETTINGS, best, 1e-3)
            others.add(other)
            assert (trial is None) == (other is None)
            assert trial is None or trial.gammas == expected.gammas[other].tolist()
            rates = found.rates
            price = (
                7 * max(rates[best] / rates[found.floor] - 1.0, 0.02) + 1e-3 / found.seconds[best]
            )
            usual = int(min(max(price / SETTINGS.probe_share, 64), SETTINGS.probe_every))
            assert abs(distance - usual) <= 1
            distances.add(distance)
    assert None in others
    assert len(others) > 3
    assert len(distances) > 3


@pytest.mark.parametrize("seed", range(4))
def test_an_exploration_is_of_the_rows_that_tell_most_for_their_price(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = random_table(rng)
    forecaster = Forecaster(
        costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS, chunk=48
    )
    num_none, numbers = 0, set()
    for _ in range(100):
        rows, scales = random_batch(rng), rng.uniform(0.7, 1.4, MAX_GAMMA + 1)
        found = forecaster.forecast(rows, scales)
        trial = plan_exploration(rows, found, SETTINGS, forecaster)
        expected = exploration(costs, rows, found.fixed, SETTINGS, shared=SHARED, chunk=48)
        num_none += expected is None
        assert (trial is None) == (expected is None)
        if trial is not None and expected is not None:
            assert (trial.gammas, trial.num_steps) == (expected[0], expected[2])
            assert trial.cost_s == pytest.approx(expected[1], rel=1e-12)
            numbers.add(trial.num_steps)
    assert 0 < num_none < 50
    assert len(numbers) > 2


def random_rounds(rng: np.random.Generator, num_rows: int) -> list[Round]:
    rounds = []
    for _ in range(int(rng.integers(1, 12))):
        asked = int(rng.integers(0, MAX_GAMMA + 1))
        drafted = asked if rng.random() < 0.5 else int(rng.integers(0, asked + 1))
        called = drafted if rng.random() < 0.5 else 0
        accepted = int(rng.integers(0, drafted + 1))
        overlaps = rng.random(min(accepted + 1, drafted)) if rng.random() < 0.5 else ()
        row = int(rng.integers(num_rows))
        rounds.append(Round(row, asked, drafted, called, accepted, tuple(overlaps)))
    return rounds


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_of_rows_and_traffic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    book = AcceptanceBook(num_rows=6, max_gamma=MAX_GAMMA, num_groups=3)
    plain = NumpyBook(6, MAX_GAMMA, 3)
    # The last one knows nothing of its own.
    for row, group in enumerate((0, 2, 1, 2, 0, 1)):
        book.start(row, group)
        plain.group_of[row] = group
    for _ in range(40):
        rounds = random_rounds(rng, 5)
        book.record(rounds)
        plain.record(rounds)
        for num_rows in (3, 6):
            survival, shares, _ = book.expect(num_rows)
            expected = plain.shares()[:, :num_rows]
            np.testing.assert_allclose(shares, expected, rtol=1e-12)
            expected = np.minimum(np.cumprod(plain.rates(), axis=1)[:num_rows], expected[0])
            np.testing.assert_allclose(survival, expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_times_of_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = StepTimes(max_gamma=MAX_GAMMA, spread=0.1)
    times.scales(1)
    plain = NumpyFilter(times._prior, times._noise)
    for _ in range(60):
        longest = int(rng.integers(0, MAX_GAMMA + 1))
        held_up = rng.random() < 0.2
        ratios = rng.lognormal(0.3, 0.5 if held_up else 0.05, int(rng.choice([1, 2, 30]))).tolist()
        times.learn(1, [(longest, ratios)])
        plain.learn(longest, ratios)
        scales = np.exp(plain.mean[0] + plain.mean[1:])
        np.testing.assert_allclose(times.scales(1), scales, rtol=1e-9)
        np.testing.assert_allclose(
            doubt(times, 1, longest), plain.doubt(longest), rtol=1e-7, atol=1e-9
        )


def test_what_rows_miss_is_priced_as_the_table_has_it() -> None:
    rng = np.random.default_rng(1)
    costs = random_table(rng)
    forecaster = Forecaster(
        costs, max_gamma=MAX_GAMMA, max_shared_missing=SHARED, settings=SETTINGS
    )
    missing = np.array([0, 1, SHARED, SHARED + 1, 7, 64, 65, 66, 500])
    expected = feeding_s(costs, missing) * (missing > SHARED)
    np.testing.assert_allclose(forecaster.feeding_s(missing), expected, rtol=1e-12)
    assert expected[:3].tolist() == [0.0] * 3
    # The table ends at the longest span that a call takes.
    fed, longest_s = costs.catch_up, costs.catch_up.seconds[0][-1]
    assert forecaster.feeding_s(1 + 3 * np.array(fed.tokens[-1:])) == pytest.approx(3 * longest_s)
    without = Forecaster(
        replace(costs, catch_up=None),
        max_gamma=MAX_GAMMA,
        max_shared_missing=SHARED,
        settings=SETTINGS,
    )
    assert not without.feeding_s(missing).any()
