"""Ways that take turns meet every disturbance alike, and their intervals are Student's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.bench.tools.paired import Turns, best_of, interval, take_turns

SPEEDS = {"a": 100.0, "b": 50.0, "slow": 10.0, "near": 49.0}


class Machine:
    """Work on a clock of its own that gets slower all the time."""

    def __init__(self, drift: float) -> None:
        self.now = 0.0
        self.drift = drift
        self.log: list[tuple[str, int, int]] = []

    def run(self, way: str, piece: int, number: int) -> tuple[int, float]:
        seconds = 1.0 / SPEEDS[way] * (1.0 + self.drift * self.now)
        self.now += seconds
        self.log.append((way, piece, number))
        return 1, seconds

    def turns(self, **options: object) -> dict[str, list[float]]:
        return take_turns(
            self.run, list(SPEEDS), num_pieces=2, contenders=["b", "slow", "near"],
            turns=Turns(**options), clock=lambda: self.now,
        )  # fmt: skip


def test_a_drift_of_the_machine_cancels() -> None:
    rates = Machine(drift=0.5).turns(seconds=2.0)
    found = interval(rates["a"], rates["b"])
    assert found.ratio == pytest.approx(2.0, rel=0.005)
    # The same ratio from runs one after the other would be far off.
    assert rates["a"][0] / rates["b"][-1] > 2.5


def test_contenders_that_are_behind_drop_out_and_only_those() -> None:
    machine = Machine(drift=0.0)
    rates = machine.turns(seconds=3.0)
    assert len(rates["slow"]) == 2
    assert len(rates["a"]) == len(rates["b"]) == len(rates["near"]) > 5
    assert best_of(["b", "slow", "near"], rates) == "b"


def test_every_piece_is_done_in_every_way_of_a_round() -> None:
    machine = Machine(drift=0.0)
    machine.turns(seconds=0.0, least_rounds=4)
    for number in range(5):
        ways = set(SPEEDS) if number <= 2 else set(SPEEDS) - {"slow"}
        done = [(way, piece) for way, piece, at in machine.log if at == number]
        assert sorted(done) == sorted((way, piece) for way in ways for piece in range(2))
    assert max(at for _, _, at in machine.log) == 4


def test_no_more_rounds_than_wanted() -> None:
    assert len(Machine(0.0).turns(seconds=1e9, most_rounds=7)["a"]) == 7


def test_intervals_hold_the_true_ratio_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        noise = np.exp(rng.normal(scale=0.1, size=(2, 6)))
        found = interval((1.1 * noise[0]).tolist(), noise[1].tolist())
        held += found.low <= 1.1 <= found.high
    # 95 % of 400, within four standard deviations.
    assert abs(held - 380) <= 4 * math.sqrt(400 * 0.05 * 0.95)


def test_one_round_says_nothing() -> None:
    found = interval([2.0], [1.0])
    assert found.ratio == pytest.approx(2.0)
    assert found.low == 0.0
    assert found.high > 1e100
