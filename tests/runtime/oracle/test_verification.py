"""Exactness of the definition, by enumeration: the emitted law is the target's to 1e-12."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from outrider.runtime.oracle.verification import (
    completed,
    count_accepted,
    count_accepted_greedy,
    count_matches,
    emitted_probs,
    gumbel_race,
    next_token_probs,
    point_mass,
    race_agreement,
    sequence_probs,
)

from tests.runtime.oracle.laws import (
    F1_DRAFT,
    F1_TARGET,
    F4A_RUNS,
    distance,
    f4a_draft,
    f4a_target,
    random_row_of,
)

MAX_ERROR = 1e-12


def first_token_law(runs, vocab_size):
    probs = np.zeros(vocab_size)
    for run, mass in runs.items():
        probs[run[0]] += mass
    return probs


def kept_with(coin, token, *, draft=F1_DRAFT, target=F1_TARGET):
    rows = np.array([target, target])
    return count_accepted(np.array([token]), np.array([draft]), rows, np.array([coin]))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4])
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
@pytest.mark.parametrize("num_zeros", [0, 1])
def test_the_emitted_law_is_the_targets(vocab_size, gamma, num_zeros):
    num_zeros = min(num_zeros, vocab_size - 1)
    for seed in range(2):
        target = random_row_of(seed, vocab_size, num_zeros=num_zeros)
        draft = random_row_of(seed + 100, vocab_size, num_zeros=num_zeros)
        runs = emitted_probs(draft, target, gamma)
        length = gamma + 1
        assert sum(runs.values()) == pytest.approx(1.0, abs=MAX_ERROR)
        probs = completed(runs, target, length)
        assert distance(probs, sequence_probs(target, length)) < MAX_ERROR


@pytest.mark.parametrize("num_zeros", [0, 2])
def test_two_hundred_random_pairs_give_the_target(num_zeros):
    for seed in range(200):
        target = random_row_of(seed, 4, num_zeros=num_zeros)
        runs = emitted_probs(random_row_of(seed + 999, 4, num_zeros=num_zeros), target, 1)
        probs = completed(runs, target, 2)
        assert distance(probs, sequence_probs(target, 2)) < MAX_ERROR


def test_the_four_token_pair_gives_the_target():  # T1
    runs = emitted_probs(lambda _: F1_DRAFT, lambda _: F1_TARGET, 1)
    assert first_token_law(runs, 4) == pytest.approx(F1_TARGET, abs=MAX_ERROR)


@pytest.mark.parametrize(("token", "share"), [(0, 1.0), (1, 0.5), (2, 1.0), (3, 1.0)])  # T2
def test_each_draft_token_is_kept_with_its_ratio(token, share):
    cells = (np.arange(1000) + 0.5) / 1000
    assert np.mean([kept_with(coin, token) for coin in cells]) == share


def test_the_coin_at_the_ratio_itself_rejects():  # T3
    assert kept_with(0.4999, 1) == 1
    assert kept_with(0.5, 1) == 0


def test_a_coin_of_zero_does_not_keep_an_impossible_token():  # T4
    assert kept_with(0.0, 1, target=np.array([0.5, 0.0, 0.5, 0.0])) == 0
    outside_both = np.array([0.0, 0.0, 0.5, 0.5])
    assert kept_with(0.0, 0, draft=outside_both, target=outside_both) == 0


def test_a_fully_accepted_draft_is_followed_by_the_bonus_row():  # T5
    draft = np.array([[0.5, 0.5], [0.5, 0.5]])
    target = np.array([[0.5, 0.5], [0.5, 0.5], [0.125, 0.875]])
    kept = count_accepted(np.array([0, 1]), draft, target, np.array([0.9, 0.9]))
    assert kept == 2
    assert next_token_probs(kept, draft, target).tolist() == [0.125, 0.875]


def test_a_rejection_at_the_first_token_uses_no_later_row():  # T6
    unused = np.full((4, 4), np.nan)
    draft = np.vstack([F1_DRAFT, unused[:3]])
    target = np.vstack([F1_TARGET, unused])
    kept = count_accepted(np.array([1, 0, 0, 0]), draft, target, np.full(4, 0.7))
    assert kept == 0
    assert next_token_probs(kept, draft, target) == pytest.approx([0.5, 0.0, 0.0, 0.5])


def test_the_run_law_of_the_markov_pair():  # T6b
    runs = emitted_probs(f4a_draft, f4a_target, 2)
    assert distance(runs, F4A_RUNS) < MAX_ERROR
    assert sum(len(run) * mass for run, mass in runs.items()) == pytest.approx(37 / 16)


def test_the_law_of_the_number_of_emitted_tokens():  # T7
    runs = emitted_probs(lambda _: F1_DRAFT, lambda _: F1_TARGET, 2)
    by_length = [sum(m for run, m in runs.items() if len(run) == n) for n in (1, 2, 3)]
    assert by_length == pytest.approx([0.2, 0.16, 0.64], abs=MAX_ERROR)
    assert np.dot(by_length, [1, 2, 3]) == pytest.approx(2.44)


def test_equal_rows_are_always_kept_and_need_no_residual():
    runs = emitted_probs(lambda _: F1_TARGET, lambda _: F1_TARGET, 2)
    assert {len(run) for run in runs} == {3}
    rows = np.array([F1_TARGET, F1_TARGET])
    assert next_token_probs(0, rows[:1], rows).tolist() == F1_TARGET.tolist()


def test_a_small_residual_is_drawn_from():
    for mass in (1e-3, 1e-6, 1e-9):
        draft, target = np.array([0.5, 0.5]), np.array([0.5 + mass, 0.5 - mass])
        rows = np.array([target, target])
        assert next_token_probs(0, draft[None], rows).tolist() == [1.0, 0.0]


def test_disjoint_supports_reject_and_fall_back_to_the_target():
    draft, target = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert emitted_probs(lambda _: draft, lambda _: target, 3) == {(1,): 1.0}


def test_greedy_keeps_the_lowest_id_of_a_tie_only():  # T9
    rows = np.array([[0.4, 0.4, 0.2]] * 2)
    assert count_accepted_greedy(np.array([0]), rows) == 1
    assert count_accepted_greedy(np.array([1]), rows) == 0


@pytest.mark.parametrize(
    ("lenience", "params"),
    [(1.0, F1_TARGET), (0.8, [0.375, 0.25, 0.1, 0.275]), (0.5, F1_DRAFT)],
)
def test_lenient_laws_of_the_four_token_pair(lenience, params):  # T13
    runs = emitted_probs(lambda _: F1_DRAFT, lambda _: F1_TARGET, 1, lenience=lenience)
    assert first_token_law(runs, 4) == pytest.approx(params, abs=MAX_ERROR)


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("is_point_mass", [False, True])
def test_no_token_of_a_lenient_run_exceeds_its_bound(lenience, is_point_mass):
    for seed in range(50):
        target = random_row_of(seed, 4)(())
        draft = point_mass(seed % 4, 4) if is_point_mass else random_row_of(seed + 50, 4)(())
        runs = emitted_probs(lambda _, q=draft: q, lambda _, p=target: p, 1, lenience=lenience)
        probs = first_token_law(runs, 4)
        assert (probs <= target / lenience + MAX_ERROR).all()
        # The least distance from p that this acceptance allows.
        kept = np.minimum(draft, target / lenience).sum() - np.minimum(draft, target).sum()
        assert abs(probs - target).sum() / 2 == pytest.approx(kept, abs=MAX_ERROR)


@pytest.mark.parametrize(("token", "is_kept"), [(0, 1), (1, 0), (2, 0), (3, 1)])  # T14
def test_lenient_greedy_keeps_tokens_near_the_greatest(token, is_kept):
    rows = np.array([F1_TARGET] * 2)
    assert count_accepted_greedy(np.array([token]), rows, lenience=0.7) == is_kept


def test_the_race_emits_the_targets_winner():  # T17
    early = np.array([0.3, 0.2, 0.9, 0.3])
    assert (gumbel_race(early, F1_TARGET), gumbel_race(early, F1_DRAFT)) == (0, 1)
    late = np.array([0.5, 0.1, 0.9, 0.2])
    assert (gumbel_race(late, F1_TARGET), gumbel_race(late, F1_DRAFT)) == (1, 1)


def test_two_races_agree_with_the_known_probability():  # T17
    assert race_agreement(F1_DRAFT, F1_TARGET) == pytest.approx(0.776016, abs=5e-7)
    assert race_agreement(F1_TARGET, F1_TARGET) == pytest.approx(1.0)
    assert race_agreement(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


def test_a_token_without_mass_never_wins_the_race():
    assert gumbel_race(np.array([1e-30, 5.0]), np.array([0.0, 1.0])) == 1


def test_a_point_mass_draft_is_kept_with_the_targets_probability():  # T18
    runs = emitted_probs(lambda _: point_mass(1, 4), lambda _: F1_TARGET, 1)
    assert sum(m for run, m in runs.items() if len(run) == 2) == pytest.approx(0.2)
    residual = next_token_probs(0, point_mass(1, 4)[None], np.array([F1_TARGET] * 2))
    assert residual == pytest.approx([0.5, 0.0, 0.125, 0.375])


def test_a_draft_token_outside_the_vocabulary_has_an_empty_row():  # T35
    assert point_mass(9, 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_match_mode_emits_the_targets_law_for_any_draft(gamma):
    target = random_row_of(5, 3)
    for draft in product(range(3), repeat=gamma):
        runs: dict[tuple[int, ...], float] = {}
        for drawn in product(range(3), repeat=gamma + 1):
            rows = [target(draft[:index]) for index in range(gamma + 1)]
            kept = count_matches(np.array(draft, dtype=np.int64), np.array(drawn))
            run = (*draft[:kept], drawn[kept])
            mass = float(np.prod([row[token] for row, token in zip(rows, drawn, strict=True)]))
            runs[run] = runs.get(run, 0.0) + mass
        probs = completed(runs, target, gamma + 1)
        assert distance(probs, sequence_probs(target, gamma + 1)) < MAX_ERROR


def test_match_mode_with_equal_models_agrees_less_than_always():  # T38
    # An argmax draft is kept with max p, which is the alpha of this mode, not 1.
    runs = emitted_probs(lambda _: point_mass(0, 4), lambda _: F1_TARGET, 1)
    assert sum(m for run, m in runs.items() if len(run) == 2) == pytest.approx(F1_TARGET.max())


def law_of_biased_scheme(draw_draft, judged_draft, target):
    """First-token law where the row judged with differs from the row drafted from."""
    probs = np.zeros(len(target))
    for token in np.flatnonzero(draw_draft):
        share = min(1.0, target[token] / judged_draft[token])
        probs[token] += draw_draft[token] * share
        rows = np.array([target, target])
        residual = next_token_probs(0, judged_draft[None], rows)
        probs += draw_draft[token] * (1.0 - share) * residual
    return probs


def test_drawing_again_after_a_mismatch_would_be_seen():  # T22
    target = np.array([0.6, 0.4])
    correct = np.zeros(2)
    redrawn = np.zeros(2)
    for drawn, mass in enumerate(target):
        kept = count_matches(np.array([0]), np.array([drawn, 0]))
        correct[0 if kept else drawn] += mass
        redrawn += mass * (point_mass(0, 2) if kept else target)
    assert correct == pytest.approx([0.6, 0.4])
    assert redrawn == pytest.approx([0.84, 0.16])


def test_dropping_unsure_draft_tokens_would_be_seen():  # T23
    draft, target = np.array([0.6, 0.4]), np.array([0.5, 0.5])
    correct = law_of_biased_scheme(draft, draft, target)
    confident = np.array([0.6, 0.0])
    dropped = law_of_biased_scheme(confident, draft, target) + 0.4 * target
    assert correct == pytest.approx([0.5, 0.5])
    assert dropped == pytest.approx([0.7, 0.3])


def test_judging_a_filtered_draft_with_its_raw_row_would_be_seen():  # T24
    raw = np.array([0.5, 0.3, 0.2])
    filtered = np.array([0.625, 0.375, 0.0])
    assert law_of_biased_scheme(filtered, filtered, raw) == pytest.approx(raw)
    assert law_of_biased_scheme(filtered, raw, raw) == pytest.approx([0.625, 0.375, 0.0])


def test_judging_an_argmax_draft_with_its_raw_row_would_be_seen():
    greedy = point_mass(1, 4)
    assert law_of_biased_scheme(greedy, greedy, F1_TARGET) == pytest.approx(F1_TARGET)
    biased = law_of_biased_scheme(greedy, F1_DRAFT, F1_TARGET)
    assert biased == pytest.approx([0.25, 0.5, 0.0, 0.25])


def test_reusing_the_coin_for_the_residual_would_be_seen():
    # b rejected means u >= .5, and the residual (.5, 0, 0, .5) cut at .5 then always yields d.
    cells = (np.arange(1000) + 0.5) / 1000
    residual = next_token_probs(0, F1_DRAFT[None], np.array([F1_TARGET] * 2))
    reused = F1_DRAFT * np.minimum(1.0, F1_TARGET / F1_DRAFT)
    for coin in cells:
        if kept_with(coin, 1) == 0:
            token = int(np.searchsorted(np.cumsum(residual), coin, side="right"))
            reused[token] += F1_DRAFT[1] / len(cells)
    assert reused[0] == pytest.approx(0.3)
    runs = emitted_probs(lambda _: F1_DRAFT, lambda _: F1_TARGET, 1)
    assert first_token_law(runs, 4)[0] == pytest.approx(0.4)


def test_reusing_a_revealed_draft_draw_would_be_seen():
    # gamma of the next round depends on a discarded draft; drafting the position again with the same draw is biased,
    # which is why DRAFT noise is keyed by the round.
    target, draft = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    reused = np.zeros(2)
    for discarded, mass in enumerate(draft):
        next_law = (
            law_of_biased_scheme(point_mass(0, 2), draft, target) if discarded == 0 else target
        )
        reused += mass * next_law
    assert reused[0] == pytest.approx(0.55)
    fresh = law_of_biased_scheme(draft, draft, target)
    assert draft[0] * fresh + draft[1] * target == pytest.approx(target)
