"""T40, prompt lookup: the hand examples and their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.text.lookup import LookupDrafter

from tests.runtime.drafters.rows import row


def find(
    history: list[int], length: int, shortest: int, longest: int, drafted: tuple[int, ...] = ()
) -> tuple[int, ...]:
    drafter = LookupDrafter(DraftingConfig(lookup_min_ngram=shortest, lookup_max_ngram=longest))
    return drafter.guess(row(history), drafted, length)


@pytest.mark.parametrize(
    ("history", "length", "ngrams", "expected"),
    [
        ([1, 2, 3, 4, 2, 3], 4, (2, 3), (4, 2, 3)),
        ([1, 2, 3, 4, 2, 3], 2, (2, 3), (4, 2)),
        ([5, 5, 5], 3, (1, 1), (5,)),
        ([1, 2, 3], 4, (2, 4), ()),
        ([1], 4, (1, 4), ()),
        ([7, 7], 4, (2, 4), ()),
        # The most recent of two matches of equal length.
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, (2, 4), (9,)),
        # A longer match wins over a more recent one.
        ([6, 1, 2, 8, 1, 2, 9, 6, 1, 2], 1, (2, 4), (8,)),
    ],
)
def test_hand_examples(
    history: list[int], length: int, ngrams: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert find(history, length, *ngrams) == expected


def slow_find(
    history: list[int], length: int, shortest: int, longest: int, drafted: tuple[int, ...] = ()
) -> tuple[int, ...]:
    context = [*history, *drafted]
    for size in range(longest, shortest - 1, -1):
        suffix = context[-size:]
        for start in range(len(history) - size - 1, -1, -1):
            if len(suffix) == size and history[start : start + size] == suffix:
                return tuple(history[start + size : start + size + length])
    return ()


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), max_size=3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_it_finds_what_a_plain_search_finds(
    history: list[int], drafted: list[int], length: int, shortest: int, more: int
) -> None:
    longest = shortest + more
    for context in ((), tuple(drafted)):
        expected = slow_find(history, length, shortest, longest, context)
        assert find(history, length, shortest, longest, context) == expected


def test_a_draft_is_cut_after_its_first_end_token() -> None:
    one = row([2, 3, 9, 4, 5, 2, 3], gamma=4, end_tokens=(5, 4))
    (draft,) = LookupDrafter(DraftingConfig(lookup_min_ngram=2, lookup_max_ngram=4)).propose(
        [one], [0]
    )
    assert draft.tokens == (9, 4)
    assert not draft.is_sampled
    assert draft.num_computed is None
