"""The formulas reproduce the paper's printed tables as far as these reproduce."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from outrider.runtime.oracle.analysis import (
    expected_tokens,
    lenient_acceptance,
    operations_factor,
    optimal_gamma,
    oracle_tokens,
    rejection_acceptance,
    walltime_factor,
)

P = np.array([0.4, 0.2, 0.1, 0.3])
Q = np.array([0.3, 0.4, 0.1, 0.2])

TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# gamma, alpha, c, printed EXP, whether the formula gives the printed digit.
TABLE_4 = [
    (7, 0.75, 0.02, 3.2, True),
    (7, 0.80, 0.04, 3.3, True),
    (7, 0.82, 0.11, 2.5, True),
    (7, 0.62, 0.02, 2.3, True),
    (5, 0.68, 0.04, 2.4, False),
    (3, 0.71, 0.11, 2.0, False),
    (5, 0.65, 0.02, 2.4, True),
    (5, 0.73, 0.04, 2.6, True),
    (3, 0.74, 0.11, 2.0, True),
    (5, 0.53, 0.02, 1.9, True),
    (3, 0.55, 0.04, 1.8, True),
    (3, 0.56, 0.11, 1.6, False),
]
OPTIMA = {
    0.01: "5/1.88 7/2.30 9/2.97 14/4.23 24/7.49 40/12.54",
    0.02: "4/1.79 6/2.17 8/2.76 11/3.82 19/6.37 31/9.95",
    0.05: "3/1.63 4/1.92 6/2.35 8/3.09 13/4.67 21/6.60",
    0.10: "2/1.46 3/1.67 4/1.98 6/2.47 10/3.43 15/4.48",
    0.20: "1/1.25 2/1.40 3/1.58 4/1.87 7/2.37 10/2.87",
    0.50: "0/1.00 1/1.07 1/1.13 2/1.22 3/1.38 5/1.51",
}
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_reproduces_entirely(
    alpha: float, gamma: int, operations: float, speed: float
) -> None:
    assert round(operations_factor(alpha, gamma, 0.0), 2) == operations
    assert round(walltime_factor(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize(("gamma", "alpha", "c", "printed", "reproduces"), TABLE_4)
def test_table_4_reproduces_within_the_rounding_of_its_inputs(
    gamma: int, alpha: float, c: float, printed: float, reproduces: bool
) -> None:
    """Three printed factors round up what the printed alpha and c give; the unrounded inputs explain them."""
    assert (round(walltime_factor(alpha, gamma, c), 1) == printed) is reproduces
    least = walltime_factor(alpha - 0.005, gamma, c + 0.005)
    most = walltime_factor(alpha + 0.005, gamma, c - 0.005)
    assert least <= printed + 0.05
    assert printed - 0.05 <= most


@pytest.mark.parametrize("c", OPTIMA)
def test_the_best_gamma_and_its_factor(c: float) -> None:
    """T11, and T12 in its corner: alpha .5 at c .5 gains nothing, so gamma is 0."""
    for alpha, cell in zip(ALPHAS, OPTIMA[c].split(), strict=True):
        gamma, factor = optimal_gamma(alpha, c, max_gamma=64)
        assert f"{gamma}/{factor:.2f}" == cell


@pytest.mark.parametrize(
    ("slope", "cell"),
    [(0, "8/3.09"), (0.02, "7/2.79"), (0.05, "6/2.47"), (0.1, "5/2.11"), (0.3, "3/1.44"), (1, "0/1.00")],
)  # fmt: skip
def test_the_best_gamma_shrinks_as_verification_costs_more(slope: float, cell: str) -> None:
    gamma, factor = optimal_gamma(
        0.8, 0.05, max_gamma=16, verify_cost=lambda k: 1 + slope * (k - 1)
    )
    assert f"{gamma}/{factor:.2f}" == cell


def test_the_factors_of_lenience_at_temperature_0() -> None:
    """Table 5's T5-small at gamma 8, c .015: the factors of A.5 that reproduce."""
    factors = [walltime_factor(alpha, 8, 0.015) for alpha in (0.75, 0.75, 0.80, 0.87)]
    assert [round(factor, 1) for factor in factors] == [3.3, 3.3, 3.9, 4.9]


def test_acceptance_of_the_worked_pair_and_its_lenience() -> None:
    assert lenient_acceptance(P, Q, 1.0) == pytest.approx(0.8)
    assert lenient_acceptance(P, Q, 0.8) == pytest.approx(0.85)
    assert lenient_acceptance(P, Q, 0.5) == pytest.approx(1.0)


def test_expected_tokens_at_the_edges() -> None:
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.0, 5) == expected_tokens(0.7, 0) == 1.0
    assert expected_tokens(0.625, 7) == pytest.approx(2.60, abs=0.01)


def test_a_gain_exists_exactly_where_alpha_exceeds_c() -> None:
    for alpha in ALPHAS:
        for c in (*OPTIMA, alpha):
            gamma, factor = optimal_gamma(alpha, c, max_gamma=64)
            assert (alpha > c) is (gamma > 0)
            if gamma:
                assert factor >= (1 + alpha) / (1 + c) - 1e-12


def test_rejection_sampling_keeps_what_its_bound_allows() -> None:
    """Appendix A.2, step by step: a token drawn from q is kept with p / (M q), and what is kept has the law p."""
    bound = float((P / Q).max())
    kept = Q * (P / (bound * Q))
    assert kept / kept.sum() == pytest.approx(P)
    assert rejection_acceptance(P, Q) == pytest.approx(kept.sum()) == pytest.approx(2 / 3)
    # What p excludes does not count; what q excludes and p does not is never drawn, so nothing may be kept.
    assert rejection_acceptance(np.array([0.5, 0.5, 0.0]), np.array([0.4, 0.3, 0.3])) == 0.6
    assert rejection_acceptance(np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])) == 0.0
    rng = np.random.default_rng(0)
    for target_probs, draft_probs in rng.dirichlet(np.ones(5), (50, 2)):
        speculative = lenient_acceptance(target_probs, draft_probs, 1.0)
        assert rejection_acceptance(target_probs, draft_probs) <= speculative


def test_an_oracle_for_gamma_ends_every_pass_with_the_token_that_is_not_kept() -> None:
    """By enumeration of a text whose places differ in acceptance: as many passes as tokens that are not kept."""
    acceptance = np.array([1.0, 0.3, 0.9, 0.5])
    num_passes = 0.0
    for kept in itertools.product((True, False), repeat=len(acceptance)):
        chance = np.where(kept, acceptance, 1.0 - acceptance).prod()
        num_passes += chance * kept.count(False)
    assert oracle_tokens(float(acceptance.mean())) == pytest.approx(len(acceptance) / num_passes)
    assert oracle_tokens(0.8) == pytest.approx(expected_tokens(0.8, 200))
    assert all(oracle_tokens(0.8) > expected_tokens(0.8, gamma) for gamma in range(40))
    assert oracle_tokens(1.0) is None
