from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import Span
from runtime.core.scheduler import (
    Prefill,
    StepLimits,
    StepPlan,
    decode_spans,
    num_to_admit,
    plan_prefill,
    plan_step,
)

LIMITS = StepLimits(max_context=20, max_gamma=6, prefill_chunk=4)


@dataclass(frozen=True)
class Row:
    num_known: int
    num_computed: int
    num_remaining: int = 100
    gamma: int = 3
    order: int = 0


@pytest.mark.parametrize(
    ("queued", "free", "admitted"), [([], 3, 0), ([1] * 5, 3, 3), ([1, 1], 3, 2), ([2, 1, 1], 3, 2)]
)
def test_as_many_are_admitted_as_slots_are_free(
    queued: list[int], free: int, admitted: int
) -> None:
    assert num_to_admit(queued, free) == admitted


def test_nobody_overtakes_a_request_that_waits_for_several_slots() -> None:
    assert num_to_admit([1, 4, 1, 1], 4) == 1


def test_a_long_prompt_is_fed_by_one_chunk_and_does_not_decode() -> None:
    plan = plan_step([Row(10, 2), Row(5, 4)], LIMITS)
    assert plan.prefill == Prefill(slot=0, length=4)
    assert plan.gammas == (None, 3)
    assert plan.has_decode


def test_the_last_chunk_leaves_one_token_and_the_row_decodes_at_once() -> None:
    plan = plan_step([Row(4, 1)], LIMITS)
    assert plan.prefill == Prefill(slot=0, length=2)
    assert plan.gammas == (3,)


def test_nothing_decodes_while_the_only_row_prefills() -> None:
    assert not plan_step([Row(10, 0)], LIMITS).has_decode


def test_the_row_admitted_first_prefills_first() -> None:
    plan = plan_step([Row(9, 0, order=7), Row(9, 0, order=2), Row(9, 0, order=5)], LIMITS)
    assert plan.prefill == Prefill(slot=1, length=4)


@pytest.mark.parametrize(
    ("row", "gamma"),
    [
        (Row(5, 4, gamma=3), 3),
        (Row(5, 4, gamma=9), 6),
        (Row(5, 4, num_remaining=3), 2),
        (Row(5, 4, num_remaining=1), 0),
        (Row(18, 17), 2),
        (Row(20, 19), 0),
        (Row(21, 20), 0),
        (Row(5, 4, gamma=0), 0),
    ],
)
def test_gamma_leaves_room_in_answer_and_context(row: Row, gamma: int) -> None:
    assert plan_step([row], LIMITS).gammas == (gamma,)


def test_decode_spans_cover_the_whole_prefix() -> None:
    assert decode_spans([4, 2], [(7, 8), None]) == [
        Span(slot=0, start=4, tokens=(7, 8), num_logits=2),
        Span(slot=1, start=2, tokens=(), num_logits=0),
    ]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=6))
def test_every_row_prefills_or_decodes_or_waits_its_turn(pairs: list[tuple[int, int]]) -> None:
    rows = [Row(known, min(done, known - 1), order=i) for i, (known, done) in enumerate(pairs)]
    plan = plan_step(rows, LIMITS)
    for slot, row in enumerate(rows):
        missing = row.num_known - row.num_computed
        if plan.prefill is not None and plan.prefill.slot == slot:
            assert 1 <= plan.prefill.length <= LIMITS.prefill_chunk
            missing -= plan.prefill.length
        assert missing >= 1
        assert (plan.gammas[slot] is not None) == (missing == 1)


def test_a_chunk_fed_ahead_is_the_step_s_only_one() -> None:
    rows = [Row(10, 2), Row(5, 4)]
    assert plan_step(rows, LIMITS, has_fed=True) == StepPlan(prefill=None, gammas=(None, 3))
    assert plan_step(rows, LIMITS).prefill == plan_prefill(rows, LIMITS.prefill_chunk)


def test_where_nobody_decodes_a_chunk_fed_ahead_keeps_no_other_waiting() -> None:
    rows = [Row(10, 2), Row(9, 0, order=1)]
    assert plan_step(rows, LIMITS, has_fed=True) == plan_step(rows, LIMITS)


def test_what_decodes_has_no_say_in_the_next_chunk() -> None:
    waiting = Row(10, 2, order=3)
    for decoding in (Row(5, 4), Row(8, 7, order=9, num_remaining=1)):
        assert plan_prefill([decoding, waiting], 4) == Prefill(slot=1, length=4)
    assert plan_prefill([Row(5, 4)], 4) is None
