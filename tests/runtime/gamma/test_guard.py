"""What drafts may lose is bounded whatever is believed of them, and measured times correct the table."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma import guard
from outrider.runtime.gamma.guard import (
    FIRST_STEPS,
    LOST_SHARE,
    MOST_LOST,
    MOST_STEPS,
    PAYBACK_STEPS,
    Budgets,
    Ratios,
)

from tests.mutants import assert_caught

PLAIN_S = 1.0


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_bounded_by_the_budget_whatever_happens(seed: int) -> None:
    """Drafts are made whenever they may be, with catching up now and then; a step loses up to two plain ones."""
    rng = np.random.default_rng(seed)
    budgets, lost_s, served_s = Budgets(), 0.0, 0.0
    budget = budgets.of(1, PLAIN_S)
    for _ in range(5000):
        if budget.is_open:
            seconds, caught_s = rng.uniform(0.8, 3.0), 2.0 * (rng.random() < 0.02)
            step_lost_s = seconds - PLAIN_S
            budgets.drafted(budget, seconds + caught_s, step_lost_s, caught_s, PLAIN_S)
            lost_s += step_lost_s + caught_s
            served_s += seconds + caught_s
        else:
            budgets.plain(budget, PLAIN_S, PLAIN_S, goes_on=False)
            served_s += PLAIN_S
            # A try that gains opens the budget again.
            if budget.left_s > 1.0:
                budgets.drafted(budget, 0.5, -0.5, 0.0, PLAIN_S)
        # One step and one catching up can overdraw.
        assert lost_s <= (FIRST_STEPS + LOST_SHARE * served_s) * PLAIN_S + 2.0 + 2.0 + 25.0 * 0.5


def test_gains_are_kept_up_to_a_bound() -> None:
    budgets = Budgets()
    budget = budgets.of(4, PLAIN_S)
    for _ in range(1000):
        budgets.drafted(budget, 0.5, -0.5, 0.0, PLAIN_S)
    assert budget.left_s == MOST_STEPS * PLAIN_S


def test_loads_have_budgets_of_their_own() -> None:
    budgets = Budgets()
    assert budgets.of(3, PLAIN_S) is budgets.of(4, PLAIN_S)
    assert budgets.of(3, PLAIN_S) is not budgets.of(5, PLAIN_S)


def test_catching_up_that_was_not_paid_back_is_charged_when_drafts_end() -> None:
    budgets = Budgets()
    budget = budgets.of(1, PLAIN_S)
    budgets.drafted(budget, 4.0, 0.0, 3.0, PLAIN_S)
    budgets.plain(budget, 1.0, PLAIN_S, goes_on=True)
    kept_s = budget.left_s
    assert kept_s > FIRST_STEPS - 0.5
    budgets.plain(budget, 1.0, PLAIN_S, goes_on=False)
    assert budget.left_s == pytest.approx(kept_s - 3.0 * 31 / 32 + LOST_SHARE)


def test_tries_are_paid_from_what_was_saved_and_no_gain_is() -> None:
    budgets = Budgets()
    budget = budgets.of(1, PLAIN_S)
    first = FIRST_STEPS * PLAIN_S
    assert budget.saved_s == budget.left_s == first
    for _ in range(200):
        budgets.plain(budget, 1.0, PLAIN_S, goes_on=False)
    saved = first + 200 * LOST_SHARE
    assert budget.saved_s == pytest.approx(saved)
    budgets.drafted(budget, 1.0, 0.25 * PLAIN_S, 0.0, PLAIN_S)
    budgets.drafted(budget, 1.0, -3.0 * PLAIN_S, 0.0, PLAIN_S)
    assert budget.saved_s == pytest.approx(saved - 0.25 * PLAIN_S)
    for _ in range(40):
        budgets.drafted(budget, 1.0, MOST_LOST * PLAIN_S, 0.0, PLAIN_S)
    assert budget.saved_s == 0.0


def test_what_is_saved_is_never_more_than_what_may_still_be_lost() -> None:
    """But for what one step overdraws: so tries keep the bound that drafts keep."""
    budgets, rng = Budgets(), np.random.default_rng(0)
    budget = budgets.of(1, PLAIN_S)
    overdrawn = (MOST_LOST + 4.0) * PLAIN_S
    for _ in range(4000):
        if rng.random() < 0.5:
            budgets.plain(budget, PLAIN_S, PLAIN_S, goes_on=bool(rng.random() < 0.3))
        else:
            lost, caught = rng.normal(0.1, 1.0), float(rng.random() < 0.02) * 4.0
            budgets.drafted(budget, PLAIN_S, lost * PLAIN_S, caught * PLAIN_S, PLAIN_S)
        assert budget.saved_s <= max(0.0, budget.left_s) + overdrawn


def test_a_ratio_comes_close_to_what_is_measured() -> None:
    ratios = Ratios()
    rng = np.random.default_rng(0)
    for _ in range(200):
        ratios.add(2, 3, 1.3 * rng.lognormal(0.0, 0.1))
    assert ratios.of(2, 3) == pytest.approx(1.3, rel=0.05)
    # Lengths that were never measured are taken to be as wrong, other loads to be right.
    assert [ratios.of(2, longest) for longest in range(5)] == [ratios.of(2, 3)] * 5
    assert [ratios.of(4, longest) for longest in range(5)] == [1.0] * 5


def test_a_slower_machine_moves_all_lengths_alike() -> None:
    ratios = Ratios()
    for _ in range(50):
        ratios.add(1, 0, 1.0)
        ratios.add(1, 4, 1.2)
    for _ in range(200):
        ratios.add(1, 4, 2.4)
    assert ratios.of(1, 4) / ratios.of(1, 0) == pytest.approx(1.2, rel=0.05)
    assert ratios.of(1, 0) == pytest.approx(2.0, rel=0.05)


def test_one_stall_is_cut() -> None:
    ratios = Ratios()
    for _ in range(50):
        ratios.add(1, 2, 1.0)
    ratios.add(1, 2, 1e6)
    assert ratios.of(1, 2) < 1.3


MUTANTS = {
    "budgets never close": (
        "budget.is_open = False",
        "budget.is_open = True",
        lambda: test_the_loss_is_bounded_by_the_budget_whatever_happens(0),
    ),
    "catching up is free": (
        "budget.left_s -= self._invested_s",
        "pass",
        test_catching_up_that_was_not_paid_back_is_charged_when_drafts_end,
    ),
    "a slow machine is taken for a slow length": (
        "value * factor",
        "value",
        test_a_slower_machine_moves_all_lengths_alike,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, test = MUTANTS[name]
    assert_caught(monkeypatch, guard, old, new, test)


@pytest.mark.parametrize("is_on", [True, False])
def test_catching_up_is_paid_from_what_was_saved_too(is_on: bool) -> None:
    budgets = Budgets()
    budget = budgets.of(1, PLAIN_S)
    first, caught = FIRST_STEPS * PLAIN_S, 6.0 * PLAIN_S
    if is_on:
        budgets.drafted(budget, 0.0, 0.0, caught, PLAIN_S)
        due = caught / PAYBACK_STEPS
    else:
        budgets.plain(budget, 0.0, PLAIN_S, caught, goes_on=True)
        assert budget.saved_s == budget.left_s == first
        budgets.plain(budget, 0.0, PLAIN_S, goes_on=False)
        due = caught
    assert budget.saved_s == budget.left_s == pytest.approx(first - due)
