"""Acceptance is learnt from what was revealed, per request first, and old rounds fade."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma import acceptance
from outrider.runtime.gamma.acceptance import Acceptance, Round

from tests.mutants import assert_caught

G = 4


def judged(
    name: str,
    num_accepted: int,
    overlaps: tuple[float, ...] = (),
    *,
    group: str = "g",
    num: int = G,
) -> Round:
    """As many as were asked for, of the draft model."""
    return Round(name, group, num, num, num, num_accepted, overlaps)


def feed(
    one: Acceptance, name: str, alpha: float, rounds: int, seed: int = 0, group: str = "g"
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        kept = rng.random(G) < alpha
        one.record([judged(name, int(np.cumprod(kept).sum()), group=group)])


def rates_of(one: Acceptance, *rows: tuple[str, str]) -> np.ndarray:
    """[n, G] that a position is kept, given that it is reached."""
    survival = one.expect(rows).survival
    return survival / np.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)


def test_a_new_row_expects_what_nobody_has_contradicted() -> None:
    survival = Acceptance(G).expect([("a", "g")]).survival
    assert survival[0] == pytest.approx([0.7, 0.49, 0.343, 0.2401])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_estimate_comes_close_to_the_truth(alpha: float) -> None:
    one = Acceptance(G)
    for index in range(20):
        feed(one, str(index), alpha, 20, seed=index)
    assert rates_of(one, ("new", "g"))[0, :2] == pytest.approx(alpha, abs=0.08)


def test_positions_behind_a_rejection_count_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "POSITION_WEIGHT", 1e-9)
    monkeypatch.setattr(acceptance, "GROUP_DECAY", 1.0)
    one = Acceptance(G)
    one.record([judged("a", kept) for kept in (4, 1, 0, 2)])
    found = rates_of(one, ("new", "g"))[0]
    assert found == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0.99], abs=1e-6)


def test_overlaps_take_the_place_of_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "POSITION_WEIGHT", 1e-9)
    monkeypatch.setattr(acceptance, "GROUP_DECAY", 1.0)
    one = Acceptance(G)
    one.record([judged("a", 0, (0.25,)), judged("a", 1, (0.75, 0.5))])
    assert rates_of(one, ("new", "g"))[0, :2] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_requests_differ_and_a_new_one_follows_its_group() -> None:
    one = Acceptance(G)
    feed(one, "good", 0.95, 60, group="x")
    feed(one, "bad", 0.05, 60, seed=1, group="y")
    good, bad, new_x, new_y = rates_of(one, ("good", "x"), ("bad", "y"), ("n", "x"), ("n", "y"))
    assert good.min() > 0.85
    assert bad[0] < 0.15
    assert new_x[0] > 0.8
    assert new_y[0] < 0.2


def test_a_request_stands_apart_from_its_group() -> None:
    one = Acceptance(G)
    for index in range(20):
        feed(one, str(index), 0.9, 20, seed=index)
    feed(one, "own", 0.1, 30)
    own, new = rates_of(one, ("own", "g"), ("new", "g"))
    assert own[0] < 0.4 < 0.75 < new[0]


def test_a_change_of_subject_is_noticed() -> None:
    one = Acceptance(G)
    feed(one, "a", 0.95, 200)
    assert rates_of(one, ("a", "g"))[0, 0] > 0.9
    feed(one, "a", 0.1, 40, seed=3)
    assert rates_of(one, ("a", "g"))[0, 0] < 0.5


def test_rounds_without_a_draft_reveal_nothing() -> None:
    one = Acceptance(G)
    before = rates_of(one, ("a", "g"))
    one.record([judged("a", 0, num=0)])
    one.record([])
    assert (rates_of(one, ("a", "g")) == before).all()


def test_rates_stay_inside_their_bounds_whatever_comes() -> None:
    one = Acceptance(G)
    for kept in (0, 4):
        one.record([judged("a", kept)] * 500)
        rates = rates_of(one, ("a", "g"))
        assert np.isfinite(rates).all()
        assert (rates >= 0.01 - 1e-12).all()
        assert (rates <= 0.99 + 1e-12).all()
        assert (np.diff(one.expect([("a", "g")]).survival, axis=1) <= 0).all()


def test_what_was_asked_for_and_not_proposed_is_not_kept_and_costs_nothing() -> None:
    """A lookup that finds something every fourth time, and is right then."""
    one = Acceptance(G)
    for index in range(200):
        drafted = 0 if index % 4 else G
        one.record([Round("a", "g", G, drafted, 0, drafted)])
    expected = one.expect([("a", "g")])
    assert expected.survival[0, 0] == pytest.approx(0.25, abs=0.1)
    assert expected.proposed[0] == pytest.approx([0.25] * G, abs=0.1)
    assert (expected.called < 0.05).all()
    assert (Acceptance(G).expect([("a", "g")]).proposed == 1.0).all()


def test_old_evidence_of_a_group_that_is_tried_again_is_turned_by_few_rounds() -> None:
    one = Acceptance(G)
    for index in range(40):
        feed(one, str(index), 0.02, 20, seed=index)
    stubborn = Acceptance(G)
    stubborn._groups = {key: value.copy() for key, value in one._groups.items()}
    one.soften("g")
    before, after = (rates_of(book, ("n", "g"))[0, 0] for book in (stubborn, one))
    assert after == pytest.approx(before, abs=0.05)
    for book in (one, stubborn):
        book.record([judged("new", G)] * 8)
    assert rates_of(one, ("n", "g"))[0, 0] > 1.5 * rates_of(stubborn, ("n", "g"))[0, 0]


def test_requests_that_ended_are_forgotten_and_groups_are_bounded() -> None:
    one = Acceptance(G)
    one.record([judged(str(n), 1, group=str(n)) for n in range(3 * acceptance.MOST_GROUPS)])
    one.keep_only({"3"})
    assert set(one._requests) == {"3"}
    assert len(one._groups) == acceptance.MOST_GROUPS


def test_many_new_groups_take_nothing_from_one_that_is_used() -> None:
    one = Acceptance(G)
    feed(one, "a", 0.05, 60)
    usual = rates_of(one, ("new", "g"))[0, 0]
    for number in range(3 * acceptance.MOST_GROUPS):
        one.record([judged(f"spelt {number}", G, group=f"spelling {number}")] * 8)
        assert rates_of(one, ("new", "g"))[0, 0] == usual
    assert rates_of(one, ("late", "spelling 191"))[0, 0] > 0.7 > 2 * usual


MUTANTS = {
    "a new group takes the place of the newest": (
        "del self._groups[next(iter(self._groups))]",
        "self._groups.popitem()",
        test_many_new_groups_take_nothing_from_one_that_is_used,
    ),
    "groups beyond the bound share one": (
        "if len(self._groups) >= MOST_GROUPS:",
        "key = None if len(self._groups) >= MOST_GROUPS else key\n            if False:",
        test_many_new_groups_take_nothing_from_one_that_is_used,
    ),
    "tokens that were not proposed are not counted as tried": (
        "min(one.num_accepted + 1, one.num_asked)",
        "min(one.num_accepted + 1, one.num_drafted)",
        test_what_was_asked_for_and_not_proposed_is_not_kept_and_costs_nothing,
    ),
    "the rejected position is not tried": (
        "min(one.num_accepted + 1, one.num_asked)",
        "one.num_accepted",
        test_the_estimate_comes_close_to_the_truth,
    ),
    "evidence of requests never weighs": (
        "one + GROUP_WEIGHT * pooled",
        "0.0 * one + GROUP_WEIGHT * pooled",
        test_a_request_stands_apart_from_its_group,
    ),
    "survival is not a product": (
        "np.cumprod(np.clip(odds",
        "(lambda rates, axis: rates)(np.clip(odds",
        test_a_new_row_expects_what_nobody_has_contradicted,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, test = MUTANTS[name]
    alphas = (
        {"alpha": 0.1} if "alpha" in test.__code__.co_varnames[: test.__code__.co_argcount] else {}
    )
    assert_caught(monkeypatch, acceptance, old, new, lambda: test(**alphas))
