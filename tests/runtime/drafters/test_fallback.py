"""Chains of fallbacks: who is asked, what is taken, and what becomes of the draft model's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.drafters.base import Draft, DraftRow
from outrider.runtime.drafters.compose import FallbackDrafter, _capped
from outrider.runtime.drafters.text.suffix import SuffixDrafter

from tests.runtime.drafters.rows import row


class Scripted:
    """Proposes its tokens, as many as asked for, and remembers who asked for how many."""

    def __init__(
        self,
        tokens: tuple[int, ...],
        *,
        expected: float | None = None,
        num_computed: int | None = None,
    ) -> None:
        self._tokens, self._expected, self._num_computed = tokens, expected, num_computed
        self.asked: list[dict[int, int]] = []

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        self.asked.append({slot: live[slot].gamma for slot in chosen})
        return [
            Draft(
                tokens=self._tokens[: live[slot].gamma],
                expected=self._expected,
                num_computed=self._num_computed,
            )
            for slot in chosen
        ]


def propose(parts, *, share: float = 0.5, gamma: int = 8) -> Draft:
    (found,) = FallbackDrafter(parts, share=share).propose([row([1, 2], gamma=gamma)], [0])
    return found


@pytest.mark.parametrize(
    ("expected", "most", "share", "tokens"),
    [
        (None, 4, 0.5, (1, 2)),
        (2.0, 4, 0.5, (1, 2)),
        (1.9, 4, 0.5, (7, 7, 7, 7)),
        (1.9, 3, 0.5, (1, 2)),
        (1.9, None, 0.2, (1, 2)),
        (0.1, None, 0.0, (1, 2)),
        (0.9, None, 1.0, (7, 7, 7, 7, 7, 7, 7, 7)),
    ],
)
def test_a_draft_that_promises_too_little_is_passed_over(
    expected: float | None, most: int | None, share: float, tokens: tuple[int, ...]
) -> None:
    parts = [(Scripted((1, 2), expected=expected), None), (Scripted((7,) * 8), most)]
    assert propose(parts, share=share).tokens == tokens


def test_what_was_passed_over_stands_where_nobody_has_more() -> None:
    last = Scripted((), num_computed=5)
    found = propose([(Scripted((1, 2), expected=0.1), None), (last, None)])
    assert found == Draft(tokens=(1, 2), expected=0.1, num_computed=5)
    assert last.asked == [{0: 8}]


def test_the_last_part_is_never_passed_over() -> None:
    assert propose([(Scripted((1,), expected=0.0), None)]).tokens == (1,)


@pytest.mark.parametrize(("most", "gamma", "behind"), [(5, 4, 1), (3, 3, 0), (9, 4, 4)])
def test_a_cap_bounds_what_stands_behind_gamma_too(most: int, gamma: int, behind: int) -> None:
    given = replace(row([1, 2], gamma=4), num_behind=4)
    (capped,) = _capped([given], [0], most)
    assert (capped.gamma, capped.num_behind) == (gamma, behind)


def test_a_cap_is_a_parts_own() -> None:
    first, last = Scripted(()), Scripted((7,) * 9)
    assert propose([(first, 2), (last, 5)]).tokens == (7,) * 5
    assert (first.asked, last.asked) == ([{0: 2}], [{0: 5}])
    assert propose([(Scripted((7,) * 9), 5)], gamma=3).tokens == (7,) * 3


def test_rows_are_asked_for_one_by_one() -> None:
    rows = [row([1, 2], gamma=4), row([1, 2], gamma=0), row([1, 2], gamma=2)]
    last = Scripted((7,) * 9, num_computed=1)
    # Of room for two a promise of 1.5 is enough, of room for four it is not.
    parts = [(Scripted((1, 2, 3), expected=1.5), None), (last, None)]
    first, third = FallbackDrafter(parts, share=0.5).propose(rows, [0, 2])
    assert (first.tokens, first.num_computed) == ((7, 7, 7, 7), 1)
    assert (third.tokens, third.num_computed) == ((1, 2), None)
    assert last.asked == [{0: 4}]


def test_suffix_decoding_expects_the_sum_of_its_tokens_chances() -> None:
    drafter = SuffixDrafter(
        DraftingConfig(suffix_factor=2.0, min_prob=0.1, max_history_tokens=99, max_scopes=1)
    )
    # 3 followed 1 2 twice in three times; behind 3 came 4 once in two times, then 5.
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 8, 1, 2]
    (found,) = drafter.propose([row(text, gamma=3)], [0])
    assert found.tokens == (3, 4, 5)
    assert found.expected == pytest.approx(2 / 3 + 1 / 3 + 1 / 3)
    (found,) = drafter.propose([row(text, gamma=3, key="b", end_tokens=(3,))], [0])
    assert (found.tokens, found.expected) == ((3,), 1.0)
    (found,) = drafter.propose([row([1, 2], gamma=3, key="c")], [0])
    assert (found.tokens, found.expected) == ((), 0.0)
