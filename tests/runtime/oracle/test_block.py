"""Block verification: its law is the target's, and it keeps no less than judging token by token; all by enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from outrider.runtime.oracle.block import (
    block_thresholds,
    count_accepted_block,
    emitted_probs_block,
    next_token_probs_block,
    prefix_weights,
)
from outrider.runtime.oracle.verification import (
    coin_cells,
    completed,
    emitted_probs,
    point_mass,
    sequence_probs,
)

from tests.runtime.oracle.laws import (
    F1_DRAFT,
    F1_TARGET,
    distance,
    f4a_draft,
    f4a_target,
    random_row_of,
)

MAX_ERROR = 1e-12
F2_DRAFT, F2_TARGET = np.array([2 / 3, 1 / 3]), np.array([1 / 3, 2 / 3])


def binary_draft(prefix):
    """A coin whose bias depends on the whole prefix."""
    first = (0.6, 0.25, 0.7, 0.4)[(len(prefix) + 2 * sum(prefix)) % 4]
    return np.array([first, 1.0 - first])


def binary_target(prefix):
    first = (0.35, 0.8, 0.45, 0.6, 0.15)[(2 * len(prefix) + sum(prefix)) % 5]
    return np.array([first, 1.0 - first])


def ternary_draft(prefix):
    row = [(0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (0.15, 0.25, 0.6)][(len(prefix) + sum(prefix)) % 3]
    return np.array(row)


def ternary_target(prefix):
    row = [(0.4, 0.25, 0.35), (0.45, 0.1, 0.45), (0.3, 0.45, 0.25)][
        (len(prefix) + 2 * sum(prefix)) % 3
    ]
    return np.array(row)


PAIRS = {
    "ternary": (ternary_draft, ternary_target),
    "binary": (binary_draft, binary_target),
    "F1": (lambda _: F1_DRAFT, lambda _: F1_TARGET),
    "F2": (lambda _: F2_DRAFT, lambda _: F2_TARGET),
    "F4a": (f4a_draft, f4a_target),
    "random": (random_row_of(1, 3), random_row_of(51, 3)),
    "with zeros": (random_row_of(2, 4, num_zeros=1), random_row_of(52, 4, num_zeros=2)),
    "equal": (lambda _: F1_TARGET, lambda _: F1_TARGET),
    "disjoint": (lambda _: np.array([0.5, 0.5, 0.0]), lambda _: np.array([0.0, 0.0, 1.0])),
}


def mean_accepted(params):
    return sum(mass * (len(run) - 1) for run, mass in params.items())


def is_exact(draft, target, gamma):
    probs = completed(emitted_probs_block(draft, target, gamma), target, gamma + 1)
    return distance(probs, sequence_probs(target, gamma + 1)) < MAX_ERROR


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_the_emitted_tokens_have_the_targets_law(pair, gamma):  # T16
    assert is_exact(*PAIRS[pair], gamma)


@pytest.mark.parametrize(("gamma", "mean"), [(1, 2 / 3), (2, 11 / 9), (3, 5 / 3), (4, 166 / 81)])
def test_the_worked_pair_keeps_the_known_number_of_tokens(gamma, mean):  # T16
    probs = emitted_probs_block(*PAIRS["F2"], gamma)
    assert mean_accepted(probs) == pytest.approx(mean, abs=MAX_ERROR)
    assert is_exact(*PAIRS["F2"], gamma)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_no_fewer_tokens_are_kept_than_token_by_token(pair, gamma):
    block, token_wise = (
        params(*PAIRS[pair], gamma) for params in (emitted_probs_block, emitted_probs)
    )
    for length in range(1, gamma + 1):
        at_least = [
            sum(m for run, m in params.items() if len(run) > length)
            for params in (block, token_wise)
        ]
        assert at_least[0] >= at_least[1] - MAX_ERROR
    if gamma == 1:
        assert distance(block, token_wise) < MAX_ERROR


def test_more_tokens_are_kept_where_a_ratio_above_1_comes_first():
    assert (
        mean_accepted(emitted_probs_block(*PAIRS["F2"], 2))
        > mean_accepted(emitted_probs(*PAIRS["F2"], 2)) + 0.1
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_for_point_masses_both_rules_emit_the_same_law(seed):
    target = random_row_of(seed, 3)

    def retrieved(prefix):
        return point_mass((seed + len(prefix)) % 3, 3)

    block = emitted_probs_block(retrieved, target, 3)
    assert distance(block, emitted_probs(retrieved, target, 3)) < MAX_ERROR


def test_a_draft_may_end_where_its_own_tokens_say():
    """Rounds of 1 token behind a drafted 0 and of 3 else, as after a drafted end-of-sequence."""
    draft, target = PAIRS["random"]
    probs = {}
    for gamma, first_verdicts in ((1, (0,)), (3, (1, 2))):
        for first, *rest in product(range(3), repeat=gamma):
            if first in first_verdicts:
                add_outcomes(probs, (first, *rest), draft, target)
    assert distance(completed(probs, target, 4), sequence_probs(target, 4)) < MAX_ERROR


def add_outcomes(params, drafted, draft, target):
    """Add to ``law`` what one draft makes a round emit."""
    prefixes = [drafted[:length] for length in range(len(drafted) + 1)]
    q, p = np.array([draft(x) for x in prefixes[:-1]]), np.array([target(x) for x in prefixes])
    tokens = np.array(drafted)
    share = float(np.prod(q[np.arange(len(drafted)), tokens]))
    for coins, volume in coin_cells(block_thresholds(tokens, q, p)):
        kept = count_accepted_block(tokens, q, p, coins)
        for token, prob in enumerate(next_token_probs_block(kept, tokens, q, p)):
            run = (*drafted[:kept], token)
            params[run] = params.get(run, 0.0) + share * volume * prob


def test_a_token_the_target_cannot_emit_ends_the_run_even_at_coin_0():
    q, p = np.array([[0.5, 0.5]] * 2), np.array([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    assert count_accepted_block(np.array([1, 0]), q, p, np.zeros(2)) == 0
    assert next_token_probs_block(0, np.array([1, 0]), q, p).tolist() == [1.0, 0.0]


def test_a_token_that_cannot_have_been_drafted_is_not_kept():
    q, p = np.array([[1.0, 0.0]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    assert prefix_weights(np.array([1]), q, p).tolist() == [1.0, 0.0]
    assert count_accepted_block(np.array([1]), q, p, np.zeros(1)) == 0


def test_equal_rows_are_kept_whole_and_their_empty_residual_is_the_target():
    row = np.array([0.5, 0.5])
    q, p, drafted = np.array([row] * 2), np.array([row] * 3), np.array([0, 1])
    assert block_thresholds(drafted, q, p).tolist() == [1.0, 1.0]
    assert count_accepted_block(drafted, q, p, np.array([0.999, 0.999])) == 2
    assert next_token_probs_block(1, drafted, q, p).tolist() == row.tolist()
