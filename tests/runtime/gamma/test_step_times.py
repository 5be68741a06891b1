"""What is learnt of steps' times: the table's errors, and not what the machine does besides."""

from __future__ import annotations

import numpy as np
import pytest
from outrider.runtime.gamma import trial_loops
from outrider.runtime.gamma.step_times import StepTimes

MAX_GAMMA = 8


def doubt(times: StepTimes, num_rows: int, longest: int) -> np.ndarray:
    """[G + 1] of the logarithm of each step's time over that of ``longest``."""
    found = np.empty(MAX_GAMMA + 1)
    trial_loops.write_doubt(times.covariance(num_rows), longest, found)
    return found


def served(times: StepTimes, errors: dict[int, float], *, rounds: int, level: float = 1.0) -> None:
    """Steps of each longest draft in turn, off the table by a factor each."""
    for _ in range(rounds):
        for longest, factor in errors.items():
            times.learn(4, [(longest, [level * factor])])


def test_nothing_served_leaves_the_table_as_it_is() -> None:
    assert StepTimes(max_gamma=MAX_GAMMA).scales(3).tolist() == [1.0] * (MAX_GAMMA + 1)


@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_errors_of_the_table_are_learnt(spread: float) -> None:
    times = StepTimes(max_gamma=MAX_GAMMA, spread=spread)
    served(times, {0: 1.0, 2: 1.5, 6: 0.7}, rounds=60)
    scales = times.scales(4)
    assert scales[[0, 2, 6]] == pytest.approx([1.0, 1.5, 0.7], rel=0.05)
    # Neighbours are moved along, but never seen, they are moved less.
    assert 1.0 < scales[3] < 1.5
    assert 0.7 < scales[7] < scales[5]


def test_a_machine_that_slows_down_changes_every_time_alike() -> None:
    times = StepTimes(max_gamma=MAX_GAMMA)
    served(times, {0: 1.0, 4: 1.0}, rounds=40)
    for _ in range(40):
        times.learn(4, [(4, [1.8] * 8)])
    scales = times.scales(4)
    assert scales[4] == pytest.approx(1.8, rel=0.02)
    # No plain step was seen since: it is taken to be slower, too.
    assert scales[0] > 1.5


def test_one_step_that_was_held_up_counts_for_little_among_others() -> None:
    times = StepTimes(max_gamma=MAX_GAMMA)
    served(times, {0: 1.0, 2: 1.0}, rounds=30)
    times.learn(4, [(2, [1.0, 50.0, 1.0, 1.0, 0.99])])
    assert times.scales(4)[2] == pytest.approx(1.0, rel=0.05)


def test_steps_that_are_often_held_up_count_with_their_mean() -> None:
    """One of four takes four times as long; with drafts, every second one."""
    rng = np.random.default_rng(0)
    times = StepTimes(max_gamma=MAX_GAMMA, spread=0.4)
    for _ in range(150):
        for longest, share in ((0, 0.25), (2, 0.5)):
            times.learn(4, [(longest, np.where(rng.random(8) < share, 4.0, 1.0).tolist())])
    scales = times.scales(4)
    assert scales[2] / scales[0] == pytest.approx(2.5 / 1.75, rel=0.15)


def test_doubt_is_about_what_was_not_served() -> None:
    times = StepTimes(max_gamma=MAX_GAMMA, spread=0.3)
    before = doubt(times, 4, 2)
    assert before[2] == 0.0
    assert before[0] > 0.3
    assert before[3] < before[8] < before[0]
    served(times, {0: 1.0, 2: 1.0}, rounds=20)
    after = doubt(times, 4, 2)
    assert after[0] < 0.1
    assert after[0] < after[8] < before[8]


def test_loads_are_learnt_apart_and_begin_with_what_is_known() -> None:
    times = StepTimes(max_gamma=MAX_GAMMA)
    for _ in range(20):
        times.learn(1, [(2, [2.0]), (0, [1.0])])
    known = times.scales(1)
    assert times.scales(32) == pytest.approx(known)
    served(times, {0: 1.0, 2: 1.0}, rounds=20)
    assert times.scales(4)[2] == pytest.approx(1.0, rel=0.05)
    assert times.scales(1) == pytest.approx(known)


def test_times_without_any_sense_leave_scales_and_doubt_within_bounds() -> None:
    times = StepTimes(max_gamma=MAX_GAMMA, spread=0.4)
    for step in range(500):
        times.learn(4, [(step % 9, [1e-9 if step % 2 else 1e9])])
    assert (times.scales(4) > 1e-3).all()
    assert (times.scales(4) < 1e3).all()
    assert doubt(times, 4, 2).max() < 10.0
