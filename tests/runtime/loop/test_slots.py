from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.runtime.loop.slots import Move, SlotAllocator


def test_freeing_the_last_slot_moves_nothing() -> None:
    slots = SlotAllocator(3)
    assert [slots.allocate() for _ in range(3)] == [0, 1, 2]
    assert slots.free(2) is None
    assert (slots.num_live, slots.num_free, slots.num_slots) == (2, 1, 3)


def test_freeing_an_earlier_slot_moves_the_last_row_into_the_hole() -> None:
    slots = SlotAllocator(3)
    for _ in range(3):
        slots.allocate()
    assert slots.free(0) == Move(2, 0)


def test_a_full_allocator_refuses() -> None:
    slots = SlotAllocator(1)
    slots.allocate()
    with pytest.raises(ValueError, match="no slot"):
        slots.allocate()


@pytest.mark.parametrize("slot", [-1, 1])
def test_a_slot_that_is_not_live_cannot_be_freed(slot: int) -> None:
    slots = SlotAllocator(2)
    slots.allocate()
    with pytest.raises(ValueError, match="not live"):
        slots.free(slot)


def test_no_slots_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SlotAllocator(0)


def test_searches_take_the_last_slots_and_move_the_lowest_of_them() -> None:
    slots = SlotAllocator(6)
    assert slots.allocate() == 0
    assert slots.reserve(2) == range(4, 6)
    assert slots.reserve(3) == range(1, 4)
    assert (slots.num_live, slots.num_reserved, slots.num_free) == (1, 5, 0)
    with pytest.raises(ValueError, match="no slot"):
        slots.allocate()
    assert slots.release(4) == Move(1, 4)
    assert slots.release(2) is None
    assert slots.allocate() == 1
    with pytest.raises(ValueError, match="not enough"):
        slots.reserve(2)
    with pytest.raises(ValueError, match="not reserved"):
        slots.release(2)


@given(st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=60))
def test_live_rows_stay_a_prefix(actions: list[int | None]) -> None:
    """Rows named by number, moved as told, are never lost or doubled."""
    slots = SlotAllocator(8)
    rows: dict[int, int] = {}
    gone: set[int] = set()
    for name, action in enumerate(actions):
        if action is None and slots.num_free:
            rows[slots.allocate()] = name
        elif action is not None and action in rows:
            gone.add(rows.pop(action))
            move = slots.free(action)
            if move is not None:
                rows[move.destination] = rows.pop(move.source)
        assert sorted(rows) == list(range(slots.num_live))
    assert not gone & set(rows.values())
    assert len(set(rows.values())) == len(rows)
