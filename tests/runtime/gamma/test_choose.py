"""Gammas follow costs and acceptance: the formula where it holds, and each position pays for itself."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma.acceptance import Expected
from outrider.runtime.gamma.choose import Options, Rows, options_of
from outrider.runtime.gamma.costs import CostTable, StepPrices
from outrider.runtime.oracle.analysis import optimal_gamma

from tests.runtime.gamma.test_controller import MAX_GAMMA, table


def options(
    costs: CostTable,
    *alphas: float,
    caps: object = MAX_GAMMA,
    fixed: object = False,
    uses_model: object = True,
    catch_up_s: object = 0.0,
    behind: object = 0,
    proposed: float = 1.0,
    packs_rows: bool = False,
    ratios: object = 1.0,
) -> Options:
    n = len(alphas)
    survival = np.array(alphas)[:, None] ** np.arange(1, MAX_GAMMA + 1)
    ones = np.ones_like(survival)
    prices = StepPrices(costs, max_gamma=MAX_GAMMA, packs_rows=packs_rows)
    token_s = next(iter(costs.host.rows.values())).token_s
    rows = Rows(
        np.broadcast_to(np.array(caps, dtype=np.int64), n),
        np.broadcast_to(np.array(fixed), n),
        np.broadcast_to(np.array(uses_model), n),
        0.0,
        np.full(n, token_s),
        np.broadcast_to(np.array(catch_up_s, dtype=np.float64), n),
        np.broadcast_to(np.array(behind, dtype=np.int64), n),
    )
    expected = Expected(survival, proposed * ones, proposed * ones)
    scales = np.broadcast_to(np.array(ratios, dtype=np.float64), MAX_GAMMA + 1).tolist()
    return options_of(rows, expected, prices.of_rows(n, 20), scales)


def rates(found: Options) -> np.ndarray:
    return found.tokens / found.seconds


def best(found: Options) -> list[int]:
    gammas: list[int] = found.gammas[int(rates(found).argmax())].tolist()
    return gammas


@pytest.mark.parametrize("behind", [0, 2])
def test_what_stands_behind_gamma_is_verified_and_kept_without_a_draft_call(behind: int) -> None:
    costs, alpha = table(c=0.5, slope=0.1), 0.8
    found = options(costs, alpha, caps=3, fixed=True, behind=behind)
    longer = options(costs, alpha, caps=3 + behind, fixed=True)
    assert found.gammas[-1].tolist() == [3]
    assert found.tokens[-1] == pytest.approx(longer.tokens[-1])
    calls_s = behind * (costs.host.call_s + costs.draft.extend_s(1, 1, 20))
    assert found.seconds[-1] == pytest.approx(longer.seconds[-1] - calls_s)
    nothing = options(costs, alpha, caps=0, behind=behind)
    assert nothing.tokens.tolist() == [1.0] * len(nothing.tokens)


@pytest.mark.parametrize("alpha", [0.02, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("packs_rows", [False, True])
def test_one_row_gets_the_gamma_of_the_formula(
    alpha: float, c: float, slope: float, packs_rows: bool
) -> None:
    expected, factor = optimal_gamma(
        alpha, c, max_gamma=MAX_GAMMA, verify_cost=lambda k: 1.0 + slope * (k - 1)
    )
    found = options(table(c=c, slope=slope), alpha, packs_rows=packs_rows)
    # alpha .5, c .1 and slope .1 tie.
    assert rates(found)[expected] == pytest.approx(rates(found).max())
    assert rates(found).max() / rates(found)[0] == pytest.approx(factor)
    assert found.gammas[expected] == [expected]


def test_a_draft_that_gains_nothing_is_not_used() -> None:
    """alpha = c = .5: gamma 1 gains exactly nothing."""
    found = options(table(c=0.5), 0.5)
    assert rates(found)[1] == pytest.approx(rates(found)[0])
    assert best(found) == [0]
    assert best(options(table(c=0.3), 0.05)) == [0]


def test_expected_tokens_and_seconds_are_those_of_the_sum() -> None:
    found = options(table(c=0.1, slope=0.2, token_s=0.01), 0.5, 0.8)
    assert found.tokens[2] == pytest.approx(2 + 0.5 + 0.25 + 0.8 + 0.64)
    # Two calls, a verification as wide as three tokens, four tokens of the host; a call of two rows costs twice.
    assert found.seconds[2] == pytest.approx(2 * 0.2 + 1.0 + 0.2 * 2 + 4 * 0.01)


def test_packed_rows_pay_by_the_total_and_padded_ones_by_the_widest() -> None:
    ways = [
        options(table(c=0.01, slope=0.5), 0.9, 0.01, caps=[4, 0], packs_rows=packs)
        for packs in (True, False)
    ]
    packed, padded = (one.seconds[4] - 0.04 for one in ways)
    assert packed == pytest.approx(1.0 + 0.5 * 2)
    assert padded == pytest.approx(1.0 + 0.5 * 4)


def test_rows_of_a_mixed_batch_get_gammas_of_their_own() -> None:
    good, bad, fair = best(options(table(c=0.02, token_s=0.15), 0.95, 0.05, 0.6))
    assert good > fair > bad == 0


def test_a_row_for_which_nothing_pays_does_not_stop_the_others() -> None:
    assert best(options(table(c=0.02, token_s=0.1), 0.9, 0.01))[1] == 0
    assert best(options(table(c=0.02, token_s=0.1), 0.9, 0.01))[0] > 0


def test_caps_hold_and_fixed_rows_keep_their_gamma() -> None:
    found = options(table(c=0.01), 0.9, 0.9, 0.01, caps=[3, 8, 5], fixed=[False, False, True])
    assert best(found)[0] == 3
    assert (found.gammas[:, 2] == 5).all()
    assert (found.gammas[:, :2] <= np.arange(MAX_GAMMA + 1)[:, None]).all()


def test_retrieved_drafts_cost_no_draft_calls() -> None:
    assert best(options(table(c=0.9), 0.6)) == [0]
    assert best(options(table(c=0.9), 0.6, uses_model=False))[0] > 0


def test_what_is_not_proposed_is_not_paid_for() -> None:
    costs = table(c=0.3, slope=0.3)
    sparse = options(costs, 0.2, proposed=0.2, packs_rows=True)
    dense = options(costs, 0.2, packs_rows=True)
    assert sparse.seconds[1] == pytest.approx(1.0 + 0.2 * 0.3 + 0.2 * 0.3)
    assert dense.seconds[1] == pytest.approx(1.0 + 0.3 + 0.3)


def test_catching_up_must_pay_before_the_answer_ends() -> None:
    assert best(options(table(c=0.05), 0.7, catch_up_s=0.05))[0] > 0
    assert best(options(table(c=0.05), 0.7, catch_up_s=5.0)) == [0]
    # A row that stays behind leaves the others their drafts.
    behind, ready = best(options(table(c=0.05), 0.7, 0.7, catch_up_s=[9.0, 0.0]))
    assert behind == 0 < ready


def test_measured_times_outweigh_the_table() -> None:
    ratios = np.ones(MAX_GAMMA + 1)
    ratios[1:] = 5.0
    assert best(options(table(c=0.05), 0.8)) != [0]
    assert best(options(table(c=0.05), 0.8, ratios=ratios)) == [0]
