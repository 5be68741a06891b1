"""What the step lets through of a sampled tree: whole, or as point masses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.runtime.drafters.base import Draft
from outrider.runtime.loop.drafting import _checked

from tests.runtime.drafters.rows import row

WHOLE = Draft(
    tokens=(1, 2, 3),
    parents=(0, 1, 0),
    candidates=((1, 3), (2,), (), ()),
    is_sampled=True,
)


def checked(draft: Draft, *, gamma: int = 2, max_nodes: int = 8, may_sample: bool = True) -> Draft:
    asked = replace(row((1, 2), gamma=gamma), max_nodes=max_nodes)
    return _checked(draft, asked, 4, may_sample=may_sample)


def test_a_whole_tree_keeps_its_laws() -> None:
    assert checked(WHOLE) == WHOLE


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_nodes": 2}, (1, 2)),
        ({"gamma": 1}, (1, 3)),
        ({"max_nodes": 0}, (1, 2)),
        ({"may_sample": False}, (1, 2, 3)),
    ],
)
def test_a_tree_that_is_cut_or_not_trusted_is_of_point_masses(
    limits: dict[str, int], tokens: tuple[int, ...]
) -> None:
    found = checked(WHOLE, **limits)
    assert (found.tokens, found.candidates, found.is_sampled) == (tokens, None, False)


def test_offers_that_are_no_children_are_the_drafters_fault() -> None:
    with pytest.raises(ValueError, match="offers of node 0"):
        checked(replace(WHOLE, candidates=((1,), (2,), (), ())))


@pytest.mark.parametrize(
    ("tokens", "candidates"),
    [((1, 2, 3), ((1, 3, 1), (2,), (), ())), ((1, 2, 1), ((1, 3), (2,), (), ()))],
)
def test_a_sibling_that_is_offered_twice_is_the_drafters_fault(
    tokens: tuple[int, ...], candidates: tuple[tuple[int, ...], ...]
) -> None:
    """Its draft row has been left without it: nothing says how likely a second one was."""
    with pytest.raises(ValueError, match="must differ"):
        checked(replace(WHOLE, tokens=tokens, candidates=candidates))
