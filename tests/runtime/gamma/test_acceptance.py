"""Acceptance is learnt from what was revealed, per row first, and old rounds fade."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma.acceptance import AcceptanceBook, Fading, Round


def book(num_rows: int = 3, max_gamma: int = 4, **fading: float) -> AcceptanceBook:
    return AcceptanceBook(
        num_rows=num_rows, max_gamma=max_gamma, num_groups=2, fading=Fading(**fading)
    )


def judged(
    row: int, num_drafted: int, num_accepted: int, overlaps: tuple[float, ...] = ()
) -> Round:
    """As many as were asked for, of the draft model."""
    return Round(row, num_drafted, num_drafted, num_drafted, num_accepted, overlaps)


def feed(one: AcceptanceBook, row: int, alpha: float, rounds: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        kept = rng.random(4) < alpha
        one.record([judged(row, 4, int(np.cumprod(kept).sum()))])


def rates_of(one: AcceptanceBook, num_rows: int) -> np.ndarray:
    """[num_rows, G] that a position is kept, given that it is reached."""
    survival = one.expect(num_rows)[0]
    return survival / np.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)


def test_a_new_row_expects_what_nobody_has_contradicted() -> None:
    assert rates_of(book(), 3) == pytest.approx(0.7)
    assert book().expect(1)[0][0] == pytest.approx([0.7, 0.49, 0.343, 0.2401])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_estimate_comes_close_to_the_truth(alpha: float) -> None:
    one = book(row_decay=0.99)
    feed(one, 0, alpha, 300)
    assert rates_of(one, 1)[0, :2] == pytest.approx(alpha, abs=0.08)


def test_positions_behind_a_rejection_count_nowhere() -> None:
    one = book(row_decay=1.0, traffic_decay=1.0, position_weight=1e-9)
    one.start(0, 0)
    one.record([judged(0, 4, 4), judged(0, 4, 1), judged(0, 4, 0), judged(0, 4, 2)])
    assert rates_of(one, 1)[0] == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0.99], abs=1e-6)


def test_overlaps_take_the_place_of_hits() -> None:
    one = book(row_decay=1.0, position_weight=1e-9)
    one.record([judged(0, 4, 0, (0.25,)), judged(0, 4, 1, (0.75, 0.5))])
    assert rates_of(one, 1)[0, :2] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_rows_differ_and_a_new_row_follows_its_group() -> None:
    one = book()
    one.start(0, 0)
    one.start(1, 1)
    feed(one, 0, 0.95, 60)
    feed(one, 1, 0.05, 60, seed=1)
    one.start(2, 0)
    good, bad, new = rates_of(one, 3)
    assert good.min() > 0.85
    assert bad[0] < 0.15
    assert new[0] > 0.8
    one.start(2, 1)
    assert rates_of(one, 3)[2, 0] < 0.2


def test_a_row_that_moves_keeps_what_it_knows() -> None:
    one = book()
    one.start(0, 0)
    one.start(2, 1)
    feed(one, 2, 0.05, 40)
    before = rates_of(one, 3)[2]
    one.move(2, 0)
    assert rates_of(one, 1)[0] == pytest.approx(before)


def test_a_change_of_subject_is_noticed() -> None:
    one = book()
    feed(one, 0, 0.95, 200)
    assert rates_of(one, 1)[0, 0] > 0.9
    feed(one, 0, 0.1, 40, seed=3)
    assert rates_of(one, 1)[0, 0] < 0.45


def test_rounds_without_a_draft_reveal_nothing() -> None:
    one = book()
    before = rates_of(one, 3)
    one.record([judged(0, 0, 0), judged(1, 0, 0)])
    assert (rates_of(one, 3) == before).all()
    one.record([])
    assert (rates_of(one, 3) == before).all()


def test_rates_stay_inside_their_bounds_whatever_comes() -> None:
    one = book()
    for accepted in (0, 4):
        for _ in range(500):
            one.record([judged(row, 4, accepted) for row in range(3)])
        rates = rates_of(one, 3)
        assert np.isfinite(rates).all()
        assert (rates >= 0.01).all()
        assert (rates <= 0.99).all()
        assert (np.diff(one.expect(3)[0], axis=1) <= 0).all()


def test_evidence_ages_in_steps_without_drafts_but_is_never_forgotten() -> None:
    one = book(traffic_decay=1.0, half_life=100.0, old_weight=4.0, position_weight=1e9)
    one.start(0, 0)
    feed(one, 0, 0.0, 64)
    one.start(0, 0)
    assert rates_of(one, 1)[0, 0] == pytest.approx(0.7 * 4 / 68)
    one.age(100)
    assert rates_of(one, 1)[0, 0] == pytest.approx(0.7 * 4 / 36)
    one.age(0)
    assert rates_of(one, 1)[0, 0] == pytest.approx(0.7 * 4 / 36)
    for _ in range(2):
        one.age(100_000)
        assert rates_of(one, 1)[0, 0] == pytest.approx(0.7 * 4 / 8)


def test_doubt_falls_with_what_was_judged_and_is_of_the_rows_group() -> None:
    one = book()
    one.start(0, 0)
    one.start(1, 1)
    before = one.expect(2)[2]
    assert before == pytest.approx((0.7 * 0.3 / 5.0) ** 0.5)
    feed(one, 0, 0.5, 100)
    told = one.expect(1)[2]
    assert told < 0.3 * before
    assert one.expect(2)[2] == pytest.approx((told + before) / 2.0)


def test_all_that_was_asked_for_is_expected_to_be_proposed_until_less_was() -> None:
    one = book()
    one.start(0, 0)
    assert (one.expect(3)[1] == 1.0).all()
    feed(one, 0, 0.6, 30)
    assert (one.expect(3)[1] == 1.0).all()


def test_shares_are_of_what_was_asked_for() -> None:
    one = book(row_decay=1.0, traffic_decay=1.0, position_weight=1e-9, traffic_weight=1e-9)
    one.record(
        [Round(0, 4, 3, 0, 3), Round(0, 4, 1, 1, 0), Round(0, 2, 2, 2, 1), Round(0, 3, 0, 0, 0)]
    )
    kept, (proposed, called), _ = one.expect(1)
    assert proposed[0] == pytest.approx([3 / 4, 2 / 4, 1 / 3, 0], abs=1e-6)
    assert called[0] == pytest.approx([2 / 4, 1 / 4, 0, 0], abs=1e-6)
    # Positions that were not proposed are not kept: what remains is P(at least so many are kept | asked for).
    assert kept[0, 0] == pytest.approx(2 / 4, abs=1e-6)
    assert kept[0, 3] == pytest.approx(0.0, abs=1e-6)


def test_a_position_that_was_never_asked_for_is_proposed_no_more_often_than_the_one_before() -> (
    None
):
    one = book()
    for _ in range(200):
        one.record([Round(0, 2, 1, 0, 1)])
    (proposed, called), (other, _) = one.expect(1)[1][:, 0], one.expect(2)[1][:, 1]
    assert proposed[1] < 0.05
    assert proposed[2:] == pytest.approx([proposed[1]] * 2)
    assert called.max() < 0.1
    # A row that knows nothing follows the traffic of its group, and takes what it knows along.
    assert other[1] < 0.1
    one.move(0, 2)
    assert one.expect(3)[1][0, 2] == pytest.approx(proposed)


def test_what_is_never_proposed_is_never_kept() -> None:
    one = book()
    for _ in range(2000):
        one.record([Round(0, 4, 0, 0, 0)])
    kept, (proposed, _), _ = one.expect(1)
    assert (kept <= proposed).all()
    assert kept.max() < 0.01
