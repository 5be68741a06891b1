"""Choosing on one half of the rounds and judging on the other, the means of a size, its bounds and the table."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.lab.bench.builds import GRID, Cell, Limits, rates_of, ways_of
from scripts.lab.bench.tools.builds_report import (
    best_of_even,
    geometric_mean,
    judged,
    markdown,
    means_of,
    misses,
)
from scripts.lab.bench.tools.paired import Interval

RATES = {
    "new auto": [110.0, 99.0, 110.0, 99.0],
    "old auto": [100.0, 100.0, 100.0, 100.0],
    "new off": [50.0, 50.0, 50.0, 50.0],
    "old off": [40.0, 50.0, 50.0, 50.0],
    "gamma 1": [120.0, 90.0, 120.0, 90.0],
    "gamma 2": [100.0, 500.0, 100.0, 500.0],
}
FIXED = ("gamma 1", "gamma 2")
WHOLE_RATES = {way: one for way, one in RATES.items() if way not in FIXED}


def test_the_best_fixed_gamma_is_chosen_on_even_rounds_and_judged_on_odd_ones() -> None:
    assert best_of_even(RATES, FIXED) == "gamma 1"
    cell = judged("10m", "code", RATES, 0)
    assert cell.best_fixed == "gamma 1"
    assert cell.ratios["to_best"].ratio == pytest.approx(99.0 / 90.0)


def test_a_ratio_is_the_median_of_paired_rounds() -> None:
    cell = judged("10m", "code", {**WHOLE_RATES, "new auto": [90.0, 95.0, 96.0, 300.0]}, 0)
    assert cell.ratios["to_old"].ratio == pytest.approx(0.955)
    assert "to_best" not in cell.ratios
    assert cell.best_fixed is None


def test_the_errors_of_cells_add_up_in_squares() -> None:
    cells = [Interval(ratio=ratio, low=ratio / 1.21, high=ratio * 1.21) for ratio in (0.5, 2.0)] * 2
    mean = geometric_mean(cells)
    assert (mean.ratio, mean.low, mean.high) == pytest.approx((1.0, 1.0 / 1.1, 1.1))


def test_every_bound_that_is_missed_is_named() -> None:
    slow = {**RATES, "new auto": [40.0, 41.0, 40.0, 41.0]}
    cells = [judged("125m", "8 code", slow, 1)]
    assert misses(cells) == [
        "125m: new/old 0.405, bound 0.98",
        "125m: new/off 0.810, bound 1.0",
        "125m: new/best fixed 0.456, bound 0.95",
        "125m 8 code: wholly below 0.93 of off",
        "125m 8 code: other greedy answers",
    ]
    assert misses([judged("10m", "8 code", RATES, 0)]) == []


def test_the_whole_runtime_is_held_to_its_own_bounds() -> None:
    rates = {**WHOLE_RATES, "new auto": [98.0] * 4}
    assert misses([judged("10m", "1 code", rates, 0)], is_whole=True) == []
    assert misses([judged("125m", "1 code", rates, 0)], is_whole=True) == [
        "125m: new/old 0.980, bound 1.0"
    ]


def test_the_tables_show_every_cell_and_every_size() -> None:
    cells = [judged(size, "1 code", RATES, 0) for size in ("10m", "125m")]
    lines = markdown(cells).splitlines()
    assert lines[2].startswith("| 10m | 1 code | 4 | 50 | 104 | ")
    assert lines[2].endswith("| gamma 1 |")
    assert [line.split(" | ")[:2] for line in lines[7:11]] == [
        ["| 10m", "new/old"], ["| 10m", "new/off"], ["| 10m", "new/best fixed"], ["| 10m", "off: new/old"],
    ]  # fmt: skip
    assert lines[-1] == "missed: nothing"
    assert set(means_of(cells, "10m")) == {"to_old", "to_off", "to_best", "off_to_off"}


def test_the_grid_has_the_cells_that_were_named() -> None:
    assert {size: len(cells) for size, cells in GRID.items()} == {
        "10m": 12,
        "125m": 12,
        "1b": 4,
        "unseen": 6,
    }
    cells = {*GRID["10m"]}
    assert len(cells) == 12
    assert {cell.batch for cell in cells} == {1, 2, 4, 8}
    assert {cell.prompts for cell in cells} == {"code", "prose", "random"}
    assert {cell.temperature for cell in cells} == {0.0, 1.0}
    assert {cell.drafter for cell in cells} == {"model", "suffix", "suffix+model:4"}


def test_all_ways_of_a_round_have_its_prompts_and_the_first_round_does_not_count() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def ask(process: str, job: dict[str, Any]) -> dict[str, Any]:
        asked.append((process, job))
        return {"tokens": 64, "seconds": 0.5, "answers": process if job["seed"] == 4 else ""}

    prompts = [(place,) for place in range(3)]
    ways = ways_of(("new", "old"), (4,))
    rates, num_unequal = rates_of(Cell(batch=1), ask, prompts, ways, Limits(seconds=9.0, rounds=4))
    assert {way: len(one) for way, one in rates.items()} == dict.fromkeys(
        ("new auto", "new off", "old auto", "old off", "gamma 4"), 4
    )
    assert rates["new auto"] == [128.0] * 4
    assert num_unequal == 1
    assert all(job["groups"] == [[(0,)], [(1,)]] for _, job in asked[:5])
    assert all(job["groups"] == [[(2,)], [(0,)]] for _, job in asked[5:10])
    assert {(process, job["gamma"]) for process, job in asked[:5]} == {
        ("new", "auto"), ("new", 0), ("old", "auto"), ("old", 0), ("fixed", 4)
    }  # fmt: skip


def test_a_new_build_alone_is_held_to_off_and_to_the_best_fixed_gamma() -> None:
    rates = {way: one for way, one in RATES.items() if not way.startswith("old")}
    cell = judged("unseen", "code", {**rates, "new off": [120.0] * 4}, 0)
    assert set(cell.ratios) == {"to_off", "to_best"}
    assert misses([cell])[0] == "unseen: new/off 0.871, bound 0.98"
