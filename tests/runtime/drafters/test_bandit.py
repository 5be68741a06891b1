"""The drafter that goes fastest is found, kept, and left when it no longer is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from outrider.runtime.drafters.bandit import DrafterChoice

NAMES = ("model", "lookup", "suffix")


def serve(choice: DrafterChoice, speeds: dict[str, float], count: int, kind: str = "k") -> Counter:
    rng = np.random.default_rng(0)
    chosen: Counter[str] = Counter()
    for _ in range(count):
        name = choice.choose(kind)
        chosen[name] += 1
        tokens = int(rng.integers(20, 60))
        elapsed = tokens / speeds[name] * float(np.exp(rng.normal(scale=0.2)))
        choice.note(kind, name, tokens=tokens, elapsed=elapsed)
    return chosen


@pytest.mark.parametrize("best", NAMES)
def test_the_fastest_gets_nearly_all_requests(best: str) -> None:
    speeds = {name: 2.0 if name == best else 1.2 for name in NAMES}
    choice = DrafterChoice(NAMES)
    chosen = serve(choice, speeds, 300)
    assert chosen[best] > 240
    assert min(chosen.values()) >= 2
    assert choice.speeds()[best] == pytest.approx(2.0, rel=0.1)


def test_a_change_of_traffic_is_noticed() -> None:
    choice = DrafterChoice(NAMES)
    serve(choice, {"model": 2.0, "lookup": 1.4, "suffix": 1.0}, 300)
    later = serve(choice, {"model": 1.0, "lookup": 1.4, "suffix": 1.0}, 200)
    assert later["lookup"] > 120


def test_kinds_of_requests_are_learnt_apart() -> None:
    choice = DrafterChoice(NAMES)
    serve(choice, {"model": 2.0, "lookup": 1.0, "suffix": 1.0}, 100, kind="greedy")
    sampled = serve(choice, {"model": 1.0, "lookup": 2.0, "suffix": 1.0}, 100, kind="sampled")
    assert sampled["lookup"] > 70


def test_a_burst_is_spread_over_what_is_not_known() -> None:
    choice = DrafterChoice(NAMES)
    assert Counter(choice.choose("k") for _ in range(9)) == dict.fromkeys(NAMES, 3)


def test_ties_go_to_the_favourite_and_the_same_history_to_the_same_choice() -> None:
    assert DrafterChoice(NAMES).choose("k") == "model"
    speeds = {"model": 1.5, "lookup": 1.5, "suffix": 1.4}
    assert serve(DrafterChoice(NAMES), speeds, 80) == serve(DrafterChoice(NAMES), speeds, 80)


def test_requests_that_tell_nothing_leave_no_trace() -> None:
    choice = DrafterChoice(NAMES)
    for _ in range(5):
        choice.note("k", choice.choose("k"), tokens=0, elapsed=1.0)
    assert choice.speeds() == {}
    assert choice.choose("k") == "model"
