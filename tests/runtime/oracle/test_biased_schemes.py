"""Published ways to judge drafts that change the law, each written out with the law it gives, beside ours (T19 to T24).

Every scheme is a mutant by design: its wrong law is known to the last digit, so a verifier that drifted towards one
would fail here against the same inputs.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.oracle.tree_walks import judge_candidates
from outrider.runtime.oracle.verification import point_mass

from tests.draft_trees import merge_chains
from tests.runtime.oracle.test_tree import (
    coin_cells,
    first_token_law,
    match_law,
    node_law,
    with_replacement_draws,
)

EXACT = 1e-12
F1_TARGET = ("2/5", "1/5", "1/10", "3/10")
F1_DRAFT = ("3/10", "2/5", "1/10", "1/5")

Law = list[Fraction]


def law(*shares: str) -> Law:
    return [Fraction(share) for share in shares]


def only(token: int, size: int) -> Law:
    return [Fraction(int(index == token)) for index in range(size)]


def scaled(shares: Law, mass: Fraction) -> Law:
    return [share * mass for share in shares]


def plus(*laws: Law) -> Law:
    return [sum(column, Fraction(0)) for column in zip(*laws, strict=True)]


def residual(target: Law, draft: Law) -> Law:
    left = [max(p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)]
    return scaled(left, 1 / sum(left)) if sum(left) else target


def by_ratio(token: int, target: Law, draft: Law) -> Law:
    """What a ratio test makes of one drafted token."""
    kept = min(Fraction(1), target[token] / draft[token])
    return plus(scaled(only(token, len(target)), kept), scaled(residual(target, draft), 1 - kept))


def resample_after_a_mismatch(target: Law) -> Law:
    """Medusa, REST: the draw that matched nothing is thrown away."""
    return plus(scaled(only(0, 2), target[0]), scaled(target, 1 - target[0]))


def draw_per_path(target: Law, first_tokens: list[int]) -> Law:
    """The same, and Ouroboros' equation (8): each path has a draw of its own, the first match wins."""
    found = scaled(target, Fraction(0))
    for draws in product(range(len(target)), repeat=len(first_tokens)):
        mass = Fraction(1)
        for drawn in draws:
            mass *= target[drawn]
        kept = [token for token, drawn in zip(first_tokens, draws, strict=True) if token == drawn]
        found = plus(found, scaled(only(kept[0], len(target)) if kept else target, mass))
    return found


def draw_per_phrase(target: Law, first_tokens: list[int]) -> Law:
    """Equation (8) with (9) read literally: the winning phrase's match, else the first draw of all."""
    found = scaled(target, Fraction(0))
    for draws in product(range(len(target)), repeat=len(first_tokens)):
        mass = Fraction(1)
        for drawn in draws:
            mass *= target[drawn]
        kept = [token for token, drawn in zip(first_tokens, draws, strict=True) if token == drawn]
        said = kept[0] if kept else draws[0]
        found = plus(found, scaled(only(said, len(target)), mass))
    return found


def argmax_draft_with_its_raw_row(target: Law, draft: Law) -> Law:
    return by_ratio(draft.index(max(draft)), target, draft)


def filtered_draft_with_its_raw_row(target: Law, draft: Law, count: int) -> Law:
    kept = sorted(range(len(draft)), key=lambda token: -draft[token])[:count]
    mass = sum(draft[token] for token in kept)
    return plus(*(scaled(by_ratio(t, target, draft), draft[t] / mass) for t in kept))


def dropped_drafts(target: Law, draft: Law, keeps: set[int]) -> Law:
    """A sampled token that is not to one's liking is dropped, and the target sampled plainly."""
    return plus(
        *(
            scaled(by_ratio(token, target, draft) if token in keeps else target, share)
            for token, share in enumerate(draft)
        )
    )


def repeats_skipped(target: Law, draft: Law) -> Law:
    """Two independent candidates; a second one equal to the first is not tested again."""
    found = scaled(target, Fraction(0))
    for first, second in product(range(len(draft)), repeat=2):
        kept = min(Fraction(1), target[first] / draft[first])
        left = residual(target, draft)
        rest = left if second == first else by_ratio(second, left, draft)
        one = plus(scaled(only(first, len(target)), kept), scaled(rest, 1 - kept))
        found = plus(found, scaled(one, draft[first] * draft[second]))
    return found


SCHEMES = {
    "drawn again after a mismatch": (
        resample_after_a_mismatch(law("3/5", "2/5")), ("21/25", "4/25"), ("3/5", "2/5"),
    ),
    "a draw per path, two children": (
        draw_per_path(law("1/2", "1/2"), [0, 1]), ("5/8", "3/8"), ("1/2", "1/2"),
    ),
    "a draw per path, three paths of one child": (
        draw_per_path(law("1/2", "1/2"), [0, 0, 0]), ("15/16", "1/16"), ("1/2", "1/2"),
    ),
    "argmax draft, raw row": (
        argmax_draft_with_its_raw_row(law(*F1_TARGET), law(*F1_DRAFT)),
        ("1/4", "1/2", "0", "1/4"), F1_TARGET,
    ),
    "filtered draft, raw row": (
        filtered_draft_with_its_raw_row(law("1/2", "3/10", "1/5"), law("1/2", "3/10", "1/5"), 2),
        ("5/8", "3/8", "0"), ("1/2", "3/10", "1/5"),
    ),
    "unsure drafts dropped": (
        dropped_drafts(law("1/2", "1/2"), law("3/5", "2/5"), {0}), ("7/10", "3/10"), ("1/2", "1/2"),
    ),
    "invalid drafts dropped": (
        dropped_drafts(law("1/2", "0", "1/2"), law("3/5", "2/5", "0"), {0}),
        ("7/10", "0", "3/10"), ("1/2", "0", "1/2"),
    ),
    "repeats skipped": (
        repeats_skipped(law(*F1_TARGET), law(*F1_DRAFT)),
        ("51/125", "1/5", "1/10", "73/250"), F1_TARGET,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_a_biased_scheme_has_the_law_that_is_said_of_it(name: str) -> None:
    found, wrong, right = SCHEMES[name]
    assert found == law(*wrong)
    assert found != law(*right)
    assert sum(found) == 1


def test_a_draw_per_phrase_favours_what_phrases_begin_with() -> None:  # T21
    target = law("2/5", "2/5", "1/5")
    assert draw_per_phrase(target, [0, 1]) == law("2/5", "12/25", "3/25")
    assert draw_per_phrase(target, [0, 0, 0])[0] == Fraction("98/125")


@pytest.mark.parametrize(
    ("chains", "target"),
    [
        ([(0,)], ("3/5", "2/5")),
        ([(0,), (1,)], ("1/2", "1/2")),
        ([(0, 0), (0, 1), (0,)], ("1/2", "1/2")),
        ([(0, 2), (1, 2)], ("2/5", "2/5", "1/5")),
        ([(0, 0), (0, 1), (0, 2)], ("2/5", "2/5", "1/5")),
    ],
)
def test_one_draw_per_node_gives_the_target_of_the_same_inputs(chains, target) -> None:
    shares = [float(share) for share in law(*target)]
    found = match_law(merge_chains(chains), lambda prefix: np.array(shares))
    assert first_token_law(found, len(shares)) == pytest.approx(shares, abs=EXACT)


@pytest.mark.parametrize("dropped", ["argmax", "filtered", "unsure", "invalid"])
def test_drafts_judged_by_the_law_they_had_give_the_target_of_the_same_inputs(dropped) -> None:
    """Chosen, filtered or selected by value, a draft is a point mass: then C1 holds."""
    target = np.array([0.5, 0.0, 0.5]) if dropped == "invalid" else np.array([0.4, 0.2, 0.4])
    for token in range(3):
        rows = point_mass(token, 3)[None]
        out = np.zeros(3)
        for coins, volume in coin_cells((token,), rows, target):
            kept, left = judge_candidates(np.array([token]), rows, target, coins)
            out += volume * (left if kept is None else point_mass(token, 3))
        np.testing.assert_allclose(out, target, rtol=0, atol=EXACT)


def test_repeats_tested_again_give_the_target_of_the_same_inputs() -> None:  # T20
    target, draft = (np.array([float(x) for x in law(*one)]) for one in (F1_TARGET, F1_DRAFT))
    found, kept = node_law(with_replacement_draws(draft, 2), target)
    np.testing.assert_allclose(found, target, rtol=0, atol=EXACT)
    assert kept == pytest.approx(0.9)


def test_a_penalty_on_the_last_position_alone_would_change_the_answer() -> None:
    """Both drafted tokens are greatest without it; penalised with the drafted prefix, the second is not."""
    logits = np.tile(np.array([2.0, 1.5], dtype=np.float32), (1, 3, 1))
    greatest = [int(row.argmax()) for row in logits[0, :2]]
    assert greatest == [0, 0]
    row = SamplingRow(
        index=0,
        slot=0,
        params=SamplingParams(temperature=0.0, repetition_penalty=2.0),
        mode=ExactnessMode.MAX_ACCEPT,
        lenience=1.0,
        seed=0,
        history=np.array([], dtype=np.int64),
        num_prompt=0,
        draft_tokens=(0, 0),
    )
    (verdict,) = CpuSampler(max_batch=1, max_gamma=2, vocab_size=2).judge(logits, [row])
    assert (verdict.num_accepted, verdict.next_token) == (1, 1)


IID = {1: 0.8, 2: 1.0, 3: 1.0}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_scheme_for_independent_candidates_keeps_more_than_the_bound(count: int) -> None:  # T19
    """min over sets H of p(H) + 1 - q(H)^K bounds what K independent candidates can yield."""
    target, draft = (np.array([float(x) for x in law(*one)]) for one in (F1_TARGET, F1_DRAFT))
    sets = [np.array(members, dtype=bool) for members in product((0, 1), repeat=4)]
    bound = min(target[one].sum() + 1 - draft[one].sum() ** count for one in sets)
    assert min(bound, 1.0) == pytest.approx(IID[count])
    assert node_law(with_replacement_draws(draft, count), target)[1] <= bound + EXACT
