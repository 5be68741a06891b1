"""What counts as a miss, and as a cliff."""

from __future__ import annotations

import pytest

from scripts.bench.never_slower import Cell, cliffs, speeds
from scripts.bench.tools.paired import Interval

GOOD = Interval(ratio=1.0, low=0.99, high=1.01)


def cell(**change: object) -> Cell:
    values = {
        "bundle": "b", "batch": 1, "prompts": "code", "temperature": 0.0, "tokens_per_s": {"adaptive": 100.0},
        "best_fixed": "gamma 1", "num_rounds": 9, "to_off": GOOD, "to_best": GOOD, "share_drafted": 1.0,
        "cost_share": 0.0,
    }  # fmt: skip
    return Cell(**{**values, **change})


@pytest.mark.parametrize(
    ("to_off", "to_best", "misses"),
    [
        ((0.95, 0.9, 0.985), (1.0, 0.9, 1.1), False),
        ((0.95, 0.92, 0.979), (1.0, 0.9, 1.1), True),
        ((1.0, 0.9, 1.1), (0.9, 0.88, 0.949), True),
        ((1.0, 0.9, 1.1), (0.9, 0.88, 0.951), False),
    ],
)
def test_a_cell_misses_when_an_interval_lies_wholly_below_its_bound(
    to_off: tuple[float, ...], to_best: tuple[float, ...], misses: bool
) -> None:
    intervals = [
        Interval(ratio=ratio, low=low, high=high) for ratio, low, high in (to_off, to_best)
    ]
    assert cell(to_off=intervals[0], to_best=intervals[1]).misses == misses


def test_a_cliff_is_a_larger_batch_with_half_the_throughput_of_the_next_smaller() -> None:
    speeds = {1: 100.0, 2: 180.0, 4: 91.0, 8: 45.0}
    cells = [cell(batch=batch, tokens_per_s={"adaptive": speed}) for batch, speed in speeds.items()]
    other = cell(batch=2, temperature=1.0, tokens_per_s={"adaptive": 10.0})
    assert cliffs([*reversed(cells), other]) == [
        "b, code, temperature 0: batch 4 to 8, 91 to 45",
    ]


def test_a_way_that_dropped_out_is_shown_as_fast_as_its_prompts_were_slow() -> None:
    rates = {"off": [100.0, 50.0, 20.0], "gamma 1": [200.0], "gamma 2": [150.0, 75.0, 30.0]}
    assert speeds(rates) == pytest.approx({"off": 50.0, "gamma 1": 100.0, "gamma 2": 75.0})
