"""The cost table is a value: monotone, interpolated, and the same after a round trip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.runtime.gamma.costs import (
    CostTable,
    HostCosts,
    ModelCosts,
    RowCosts,
    RowKind,
    fit_host,
    monotone,
    proportional,
)

GRID = ModelCosts(
    batches=(1, 4),
    tokens=(2, 4),
    seconds=((1.0, 2.0), (3.0, 6.0)),
    capacity=128,
    position_s=0.01,
)
ROWS = {kind: RowCosts(row_s=0.1 + i, token_s=0.2 * i) for i, kind in enumerate(RowKind)}
TABLE = CostTable(
    target=GRID,
    draft=replace(GRID, seconds=((0.1, 0.2), (0.3, 0.6))),
    catch_up=ModelCosts(
        batches=(1,), tokens=(2, 64), seconds=((0.1, 1 / 3),), capacity=128, position_s=0.0
    ),
    host=HostCosts(step_s=0.5, call_s=0.25, rows=ROWS),
    capacities=(128, 256, 300),
)


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity", "expected"),
    [
        (1, 2, 128, 1.0),
        (1, 1, 128, 1.0),
        (1, 3, 128, 1.5),
        (4, 4, 128, 6.0),
        (2, 2, 128, 1 + 2 / 3),
        (1, 6, 128, 3.0),
        (7, 2, 128, 5.0),
        (4, 2, 228, 3.0 + 4 * 100 * 0.01),
        (4, 2, 64, 3.0),
    ],
)
def test_times_are_interpolated_inside_and_continued_outside(
    batch: int, tokens: int, capacity: int, expected: float
) -> None:
    assert GRID.extend_s(batch, tokens, capacity) == pytest.approx(expected)


def test_more_never_costs_less() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        fitted = monotone(rng.uniform(0.5, 2.0, size=(4, 3)))
        assert (np.diff(fitted, axis=0) >= 0).all()
        assert (np.diff(fitted, axis=1) >= 0).all()


def test_a_monotone_grid_is_left_alone_and_noise_is_averaged() -> None:
    rising = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert (monotone(rising) == rising).all()
    assert monotone(np.array([[1.0, 3.0, 2.0]])).tolist() == [[1.0, 2.5, 2.5]]


@pytest.mark.parametrize("draft", [TABLE.draft, None])
def test_a_table_survives_a_round_trip_exactly(draft: ModelCosts | None) -> None:
    table = replace(TABLE, draft=draft, catch_up=TABLE.catch_up if draft else None)
    assert CostTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        TABLE.to_json().replace("step_s", "steps"),
        TABLE.to_json().replace('"greedy"', '"other"'),
        TABLE.to_json().replace("0.5", "-0.5"),
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        CostTable.from_json(text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batches": (4, 1)}, "batches"),
        ({"tokens": ()}, "tokens"),
        ({"tokens": (2, 3, 4)}, "seconds"),
        ({"seconds": ((1.0, 0.5), (3.0, 6.0))}, "seconds"),
        ({"seconds": ((0.0, 2.0), (3.0, 6.0))}, "seconds"),
        ({"seconds": ((1.0, float("nan")), (3.0, 6.0))}, "seconds"),
        ({"position_s": -1.0}, "position_s"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        replace(GRID, **change)


def test_the_cache_size_follows_the_longest_row() -> None:
    assert [TABLE.capacity_for(n) for n in (1, 128, 129, 256, 299, 999)] == [
        128, 128, 256, 256, 300, 300,
    ]  # fmt: skip


def test_host_costs_come_back_from_what_they_made() -> None:
    samples = [
        (kind, rows, gamma, 0.5 + 0.25 * gamma + rows * (ROWS[kind].row_s + gamma * ROWS[kind].token_s))
        for kind in RowKind for rows in (1, 8) for gamma in (0, 4)
    ]  # fmt: skip
    fitted = fit_host(samples)
    assert fitted.step_s == pytest.approx(0.5)
    assert fitted.call_s == pytest.approx(0.25)
    for kind in RowKind:
        assert fitted.rows[kind].row_s == pytest.approx(ROWS[kind].row_s)
        assert fitted.rows[kind].token_s == pytest.approx(ROWS[kind].token_s, abs=1e-9)


def test_noise_never_makes_a_cost_negative() -> None:
    samples = [
        (kind, rows, gamma, 1.0 - 0.01 * rows - 0.02 * gamma)
        for kind in RowKind
        for rows in (1, 8)
        for gamma in (0, 4)
    ]
    fitted = fit_host(samples)
    assert fitted.step_s > 0.8
    assert min(fitted.call_s, *(row.row_s for row in fitted.rows.values())) >= 0.0


def test_what_is_dearer_per_token_than_something_smaller_was_disturbed() -> None:
    measured = np.array([[1.0, 1.2, 9.0], [1.4, 30.0, 4.0]])
    fitted = proportional(measured, (1, 2), (2, 4, 8))
    assert fitted.tolist() == [[1.0, 1.2, 2.4], [1.4, 2.4, 4.0]]
    assert proportional(fitted, (1, 2), (2, 4, 8)).tolist() == fitted.tolist()
