"""The cost table is a value: monotone, interpolated, and the same after a round trip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.runtime.calibration.store import table_from_json, table_to_json
from outrider.runtime.gamma.costs import (
    CostTable,
    HostCosts,
    ModelCosts,
    RowCosts,
    RowKind,
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


@pytest.mark.parametrize("draft", [TABLE.draft, None])
def test_a_table_survives_a_round_trip_exactly(draft: ModelCosts | None) -> None:
    table = replace(TABLE, draft=draft, catch_up=TABLE.catch_up if draft else None)
    assert table_from_json(table_to_json(table)) == table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        table_to_json(TABLE).replace("step_s", "steps"),
        table_to_json(TABLE).replace('"greedy"', '"other"'),
        table_to_json(TABLE).replace("0.5", "-0.5"),
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        table_from_json(text)


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
