from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.runtime.core.scheduler import (
    MOST_PADDING,
    Prefill,
    StepLimits,
    StepPlan,
    num_to_admit,
    plan_prefill,
    plan_step,
)

LIMITS = StepLimits(max_context=20, max_gamma=6, max_depth=10, prefill_chunk=4)


@dataclass(frozen=True)
class Row:
    num_known: int
    num_computed: int
    num_remaining: int = 100
    gamma: int = 3
    order: int = 0
    num_unread: int = 0
    chunk_end: int = 0
    num_pending: int = 0
    leader: Row | None = None
    is_scored: bool = False

    @property
    def itself(self) -> Row:
        """What a request keeps in objects of their own, this row has itself."""
        return self

    sequence = cache = speculation = group = itself


@pytest.mark.parametrize(
    ("queued", "free", "admitted"), [([], 3, 0), ([1] * 5, 3, 3), ([1, 1], 3, 2), ([2, 1, 1], 3, 2)]
)
def test_as_many_are_admitted_as_slots_are_free(
    queued: list[int], free: int, admitted: int
) -> None:
    assert num_to_admit(queued, free) == admitted


def test_nobody_overtakes_a_request_that_waits_for_several_slots() -> None:
    assert num_to_admit([1, 4, 1, 1], 4) == 1
    behind = iter([1, 4, 1, 1])
    assert num_to_admit(behind, 4) == 1
    assert list(behind) == [1, 1]


def test_a_long_prompt_is_fed_by_one_chunk_and_does_not_decode() -> None:
    plan = plan_step([Row(10, 2), Row(5, 4)], LIMITS)
    assert plan.prefill == Prefill(slot=0, lengths=(4,))
    assert plan.gammas == (None, 3)
    assert plan.has_decode


def test_the_last_chunk_leaves_one_token_and_the_row_decodes_at_once() -> None:
    plan = plan_step([Row(4, 1)], LIMITS)
    assert plan.prefill == Prefill(slot=0, lengths=(2,))
    assert plan.gammas == (3,)


@pytest.mark.parametrize(
    ("missing", "lengths", "gammas"),
    [(1, None, (3,)), (2, (2,), (None,)), (4, (4,), (None,)), (5, (4,), (3,)), (9, (4,), (None,))],
)
def test_a_chunk_that_answers_takes_the_last_token_too(
    missing: int, lengths: tuple[int, ...] | None, gammas: tuple[int | None, ...]
) -> None:
    """A row decodes from the next step on, or at once where one token is left behind the chunk."""
    answering = replace(LIMITS, answers_prompts=True)
    plan = plan_step([Row(10, 10 - missing)], answering)
    assert plan.prefill == (None if lengths is None else Prefill(slot=0, lengths=lengths))
    assert plan.gammas == gammas


def test_the_bound_of_a_chunk_counts_last_tokens() -> None:
    rows = [Row(5, 0), Row(5, 0), Row(5, 0)]
    for answers, fed in ((False, (4, 4, 4)), (True, (5, 5))):
        bounds = replace(
            LIMITS, prefill_chunk=14, prefill_rows=3, max_context=20, answers_prompts=answers
        )
        assert plan_prefill(rows, bounds) == Prefill(slot=0, lengths=fed)


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize(("shared", "tokens"), [(2, 2), (7, 7), (9, 7)])
def test_a_chunk_is_narrower_where_rows_decode(shared: int, tokens: int, is_scored: bool) -> None:
    sharing = replace(LIMITS, prefill_chunk=7, scored_chunk=7, shared_chunk=shared)
    reading, decoding = Row(20, 0, is_scored=is_scored), Row(5, 4, order=9)
    assert plan_step([reading, decoding], sharing).prefill == Prefill(slot=0, lengths=(tokens,))
    # A row whose source is still to be read does not decode.
    for others in ([], [replace(decoding, num_unread=3)], [Row(9, 0, order=9)]):
        assert plan_prefill([reading, *others], sharing) == Prefill(slot=0, lengths=(7,))


@pytest.mark.parametrize(
    ("num_reading", "num_decoding", "tokens"), [(2, 1, 7), (2, 2, 3), (2, 3, 3), (3, 2, 7)]
)
def test_where_more_rows_wait_to_be_fed_than_decode_a_chunk_is_wide(
    num_reading: int, num_decoding: int, tokens: int
) -> None:
    sharing = replace(LIMITS, prefill_chunk=7, shared_chunk=3)
    rows = [Row(20, 0)] * num_reading + [Row(5, 4, order=9)] * num_decoding
    assert plan_step(rows, sharing).prefill == Prefill(slot=0, lengths=(tokens,))


SCORED = replace(LIMITS, prefill_chunk=8, prefill_rows=4, scored_chunk=6, answers_prompts=True)


@pytest.mark.parametrize(
    ("scored", "order", "planned"),
    [
        # Who is not scored joins neighbours that are not, in chunks as ever.
        ((False, False, True), 0, Prefill(slot=0, lengths=(4, 4))),
        ((False, True, False), 0, Prefill(slot=0, lengths=(4,))),
        # Who is scored joins those who are, in chunks of their own.
        ((True, False, True), 0, Prefill(slot=0, lengths=(4,))),
        ((False, True, True), 1, Prefill(slot=1, lengths=(4,))),
    ],
)
def test_prompts_that_are_scored_join_one_another_alone(
    scored: tuple[bool, ...], order: int, planned: Prefill
) -> None:
    rows = [Row(4, 0, order=(slot - order) % 3, is_scored=one) for slot, one in enumerate(scored)]
    assert plan_prefill(rows, SCORED) == planned
    assert plan_prefill(rows, replace(SCORED, scored_chunk=8)).lengths == (
        planned.lengths if order == 0 else (4, 4)
    )
    assert plan_prefill([Row(20, 0, is_scored=True)], SCORED) == Prefill(slot=0, lengths=(6,))


def test_nothing_decodes_while_the_only_row_prefills() -> None:
    assert not plan_step([Row(10, 0)], LIMITS).has_decode


def test_the_row_admitted_first_prefills_first() -> None:
    plan = plan_step([Row(9, 0, order=7), Row(9, 0, order=2), Row(9, 0, order=5)], LIMITS)
    assert plan.prefill == Prefill(slot=1, lengths=(4,))


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


MANY = replace(LIMITS, prefill_chunk=256, prefill_rows=8)


def waiting(*missing: int) -> list[Row]:
    """Rows admitted in the order of their slots; those that miss nothing decode."""
    return [
        Row(length + 1, 0, order=i) if length else Row(9, 8) for i, length in enumerate(missing)
    ]


@pytest.mark.parametrize(
    ("missing", "slot", "lengths"),
    [
        ((64, 64, 64), 0, (64, 64, 64)),
        # As many as fit into the chunk with it.
        ((64, 64, 64, 64, 64), 0, (64, 64, 64, 64)),
        ((64, 70, 64, 64), 0, (64, 70, 64)),
        # A row that pads, or makes others pad, is left for a call of its own.
        ((64, 48, 47, 64), 0, (64, 48)),
        ((40, 57), 0, (40,)),
        ((40, 56, 30), 0, (40, 56)),
        # Nobody decodes along, nor does anybody jump over who does.
        ((0, 20, 0, 20), 1, (20,)),
        ((0, 20, 20, 0), 1, (20, 20)),
        # Longer than the chunk: alone.
        ((500, 500), 0, (256,)),
        ((1, 2, 3), 0, (1, 2, 3)),
    ],
)
def test_prompts_of_about_one_length_are_fed_together(
    missing: tuple[int, ...], slot: int, lengths: tuple[int, ...]
) -> None:
    assert plan_prefill(waiting(*missing), MANY) == Prefill(slot=slot, lengths=lengths)


def test_the_chunk_belongs_to_the_oldest_and_then_to_the_older_neighbour() -> None:
    rows = [Row(101, 0, order=order) for order in (5, 3, 0, 4, 1)]
    assert plan_prefill(rows, MANY) == Prefill(slot=1, lengths=(100, 100))
    assert plan_prefill(rows, replace(MANY, prefill_chunk=300)) == Prefill(
        slot=1, lengths=(100, 100, 100)
    )


def test_no_more_rows_are_fed_together_than_the_engine_takes() -> None:
    for rows in (1, 2, 3):
        planned = plan_prefill(waiting(16, 16, 16), replace(MANY, prefill_rows=rows))
        assert planned == Prefill(slot=0, lengths=(16,) * rows)


def test_rows_whose_prompts_were_fed_together_decode_in_the_same_step() -> None:
    plan = plan_step(waiting(16, 0, 16, 16), MANY)
    assert plan.gammas == (3, 3, None, None)
    assert plan_step(waiting(16, 16, 0, 40), MANY).gammas == (3, 3, 3, None)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_a_call_keeps_its_bounds_and_serves_the_oldest(
    rows: list[tuple[int, int]], chunk: int, most_rows: int
) -> None:
    live = [Row(missing + 1, 0, order=order) for missing, order in rows]
    planned = plan_prefill(live, replace(MANY, prefill_chunk=chunk, prefill_rows=most_rows))
    waiting_rows = [row for row in live if row.num_known > 1]
    if not waiting_rows:
        assert planned is None
        return
    assert planned is not None
    fed = live[planned.slot : planned.slot + len(planned.lengths)]
    assert min(waiting_rows, key=lambda row: row.order) in fed
    assert len(fed) == len(planned.lengths) <= most_rows
    assert len(fed) * max(planned.lengths) <= chunk or len(fed) == 1
    assert max(planned.lengths) - min(planned.lengths) <= MOST_PADDING
    for row, length in zip(fed, planned.lengths, strict=True):
        assert length == min(row.num_known - 1, chunk) >= 1


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=6))
def test_every_row_prefills_or_decodes_or_waits_its_turn(pairs: list[tuple[int, int]]) -> None:
    rows = [Row(known, min(done, known - 1), order=i) for i, (known, done) in enumerate(pairs)]
    plan = plan_step(rows, LIMITS)
    for slot, row in enumerate(rows):
        missing = row.num_known - row.num_computed
        if plan.prefill is not None and plan.prefill.slot == slot:
            (length,) = plan.prefill.lengths
            assert 1 <= length <= LIMITS.prefill_chunk
            missing -= length
        assert missing >= 1
        assert (plan.gammas[slot] is not None) == (missing == 1)


def test_a_chunk_fed_ahead_is_the_step_s_only_one() -> None:
    rows = [Row(10, 2), Row(5, 4)]
    assert plan_step(rows, LIMITS, has_fed=True) == StepPlan(prefill=None, gammas=(None, 3))
    assert plan_step(rows, LIMITS).prefill == plan_prefill(rows, LIMITS)


def test_where_nobody_decodes_a_chunk_fed_ahead_keeps_no_other_waiting() -> None:
    rows = [Row(10, 2), Row(9, 0, order=1)]
    assert plan_step(rows, LIMITS, has_fed=True) == plan_step(rows, LIMITS)


def test_what_decodes_has_no_say_in_the_next_chunk() -> None:
    waiting = Row(10, 2, order=3)
    for decoding in (Row(5, 4), Row(8, 7, order=9, num_remaining=1)):
        assert plan_prefill([decoding, waiting], LIMITS) == Prefill(slot=1, lengths=(4,))
    assert plan_prefill([Row(5, 4)], LIMITS) is None


READING = replace(LIMITS, read_tokens=64, prefill_rows=8, answers_prompts=True)


def unread(num_tokens: int, *, order: int = 0, num_known: int = 1) -> Row:
    return Row(num_known, 0, order=order, num_unread=num_tokens)


def test_a_row_decodes_in_the_step_of_its_read_where_its_prefix_is_one_token() -> None:
    plan = plan_step([unread(9, num_known=1), unread(9, num_known=2), Row(5, 4)], READING)
    assert (plan.read, plan.prefill) == (range(2), None)
    assert plan.gammas == (3, None, 3)


def test_a_step_has_a_read_or_a_chunk_for_the_row_admitted_first() -> None:
    rows = [Row(9, 0, order=1), unread(9, order=2)]
    plan = plan_step(rows, READING)
    assert (plan.read, plan.prefill) == (range(0), Prefill(slot=0, lengths=(4,)))
    plan = plan_step([replace(rows[0], order=3), rows[1]], READING)
    assert (plan.read, plan.prefill) == (range(1, 2), None)
    assert plan.gammas == (None, 3)


def test_a_row_that_has_read_goes_on_before_one_that_came_later_reads() -> None:
    plan = plan_step([unread(9, order=2), Row(2, 0, order=1)], READING)
    assert (plan.read, plan.prefill) == (range(0), Prefill(slot=1, lengths=(2,)))


@pytest.mark.parametrize(
    ("lengths", "read"),
    [
        ([30, 30, 30], range(2)),  # a third would make 90 tokens
        ([100, 2, 2], range(1)),  # one is read whatever its length
        ([2, 30, 2], range(1)),  # 28 tokens of padding are more than a call costs
        ([2, 18, 2], range(3)),
    ],
)
def test_sources_alike_are_read_together(lengths: list[int], read: range) -> None:
    rows = [unread(length, order=order) for order, length in enumerate(lengths)]
    assert plan_step(rows, READING).read == read


def test_an_unread_row_is_fed_nothing() -> None:
    rows = [Row(9, 0, order=1), unread(5, order=2, num_known=9), Row(9, 0, order=3)]
    assert plan_prefill(rows, READING) == Prefill(slot=0, lengths=(4,))


def test_forced_tokens_are_fed_with_the_token_before_them() -> None:
    """Tokens that a form has forced are no prompt: the row decodes, and nobody's prompt or source waits for it."""
    forced = Row(num_known=15, num_computed=9, num_pending=5)
    prompt = Row(num_known=9, num_computed=0, order=1)
    unread = Row(num_known=1, num_computed=0, num_unread=7, order=2)
    plan = plan_step([forced, prompt], LIMITS)
    assert (plan.prefill, plan.gammas) == (Prefill(slot=1, lengths=(4,)), (3, None))
    assert plan_step([forced, unread], LIMITS).read == range(1, 2)
