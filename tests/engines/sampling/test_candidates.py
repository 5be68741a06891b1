"""Trees of sampled candidates on the CPU sampler: its exact law by walking its noise, against the oracle's formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.sampling.base import CandidateNode, ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import CounterNoise, Purpose
from outrider.engines.sampling.token_probs import TokenProbs
from outrider.engines.sampling.tree_judge import judge
from outrider.engines.trees import path_to
from outrider.runtime.oracle.verification import completed, sequence_probs

from tests.engines.rows import masks_at, row_for
from tests.engines.sampling.chosen_noise import ChosenNoise, law_of
from tests.runtime.oracle.laws import F1_DRAFT, F1_TARGET, distance, random_row_of

MAX_ERROR = 1e-6
LENIENT, SEED_STABLE = ExactnessMode.LENIENT, ExactnessMode.SEED_STABLE


def logits_of(row):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(row)).astype(np.float32)


def sampler_for(vocab_size, noise=None):
    return CpuSampler(max_batch=2, max_gamma=8, vocab_size=vocab_size, noise=noise)


def walked(run):
    """``law_of`` with every token that is drawn in the trail."""
    draw, current = TokenProbs.draw, []

    def traced_draw(params, uniform):
        token = draw(params, uniform)
        current[-1].trail.append(token)
        return token

    def traced_run(noise):
        current[:] = [noise]
        return run(noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenProbs, "draw", traced_draw)
        return law_of(traced_run)


def grown(sampler, draft_row, shape, *, draft_vocab=None, mask_of=None, **changes):
    """A judge's row of a tree drawn level by level."""
    vocab_size = len(draft_row(()))
    tokens, parents, candidates, paths = [], [], [[]], [()]
    level = [(0, ())]
    for count in shape:
        following = []
        for node, path in level:
            row = row_for(path, masks=masks_at(mask_of, [path]), **changes)
            point = CandidateNode(row=row, column=0, node=node, count=count)
            logits = logits_of(draft_row(path))[None, None, :draft_vocab]
            (drawn,) = sampler.propose_children(logits, [point], vocab_size=vocab_size)
            for token in drawn:
                tokens.append(token)
                parents.append(node)
                candidates.append([])
                paths.append((*path, token))
                candidates[node].append(len(tokens))
                following.append((len(tokens), (*path, token)))
        level = following
    tree = {"parents": tuple(parents), "candidates": tuple(map(tuple, candidates))}
    changes["masks"] = masks_at(mask_of, paths)
    return row_for(tokens, is_sampled_draft=True, **tree, **changes)


def one_round(draft_row, target_row, shape, noise, **changes):
    """Row and verdict of a tree that was drawn and judged by one sampler."""
    sampler = sampler_for(len(target_row(())), noise)
    row = grown(sampler, draft_row, shape, **changes)
    rows = [target_row(tokens_to(row, node)) for node in range(len(row.draft_tokens) + 1)]
    return row, judge(sampler, logits_of(rows)[None], [row])[0]


def tokens_to(row, node):
    return tuple(row.draft_tokens[n - 1] for n in path_to(node, row.parents)[1:])


def run_of(row, verdict):
    return (*(row.draft_tokens[node - 1] for node in verdict.path), verdict.next_token)


def round_law(draft_row, target_row, shape, **changes):
    return walked(lambda noise: run_of(*one_round(draft_row, target_row, shape, noise, **changes)))


def assert_is_targets(draft_row, target_row, shape, expected=None, **changes):
    probs = round_law(draft_row, target_row, shape, **changes)
    expected = expected or target_row
    length = max(map(len, probs))
    assert length == len(shape) + 1
    assert (
        distance(completed(probs, expected, length), sequence_probs(expected, length)) < MAX_ERROR
    )


class KeptOnly(ChosenNoise):
    """Walks candidates and coins; what is drawn in the end is always the same."""

    def uniform(self, seed, *, purpose, position, round_start):
        return 0.5


def acceptance(draft, target, count, **changes):
    """Chance that a candidate of the root is kept."""

    def kept(noise):
        within = KeptOnly(noise.values)
        within.trail = noise.trail
        return bool(
            one_round(lambda _: draft, lambda _: target, (count,), within, **changes)[1].path
        )

    return walked(kept).get(True, 0.0)


# --- what is drawn


def drawn_law(count):
    """Law of the candidates of one node, in their order."""

    def drawn(noise):
        row = grown(sampler_for(4, noise), lambda _: F1_DRAFT, (count,))
        return tuple(row.draft_tokens[child - 1] for child in row.candidates[0])

    return walked(drawn)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_candidate_is_drawn_from_what_the_likeliest_leave(count):
    points = tuple(int(one) for one in np.argsort(-F1_DRAFT, kind="stable")[: count - 1])
    rest = np.where(np.isin(range(4), points), 0.0, F1_DRAFT)
    expected = {(int(x), *points): rest[x] / rest.sum() for x in np.flatnonzero(rest)}
    assert distance(drawn_law(count), expected) < MAX_ERROR


@pytest.mark.parametrize("params", [{}, {"top_k": 3}])
def test_of_equal_tokens_the_lower_is_the_likelier(params):
    row = grown(
        sampler_for(4),
        lambda _: np.array([0.2, 0.3, 0.3, 0.2]),
        (2,),
        params=SamplingParams(**params),
    )
    assert row.draft_tokens[1] == 1


@pytest.mark.parametrize(("draft", "top_k"), [([0.0, 0.0, 0.7, 0.3], 0), ([0.1, 0.2, 0.3, 0.4], 2)])
def test_no_more_is_drawn_than_there_is(draft, top_k):
    params = SamplingParams(top_k=top_k)
    row = grown(sampler_for(4), lambda _: np.array(draft), (4,), params=params)
    assert sorted(row.draft_tokens) == [2, 3]


def test_a_draft_row_that_is_not_finite_offers_token_0():
    row = grown(sampler_for(4), lambda _: np.full(4, np.nan), (3,))
    assert (tuple(row.draft_tokens), row.candidates[0]) == ((0,), (1,))


def test_every_candidate_and_coin_has_an_address_of_its_own():
    noise = Recording()
    one_round(lambda _: F1_DRAFT, lambda _: F1_TARGET, (3, 2), noise, history=np.arange(4))
    drafted = [a for a in noise.addresses if a[0] is Purpose.CANDIDATE]
    assert len(set(noise.addresses)) == len(noise.addresses)
    assert {a[1:3] for a in drafted} == {(4, 4), (5, 4)}  # position, and where the round began
    assert [a[3:] for a in drafted if a[1] == 4] == [(0, 0)]
    assert len({a[3] for a in drafted if a[1] == 5}) == 3
    coins = [a for a in noise.addresses if a[0] is Purpose.CANDIDATE_COIN]
    assert all(a[2] == 4 for a in coins)
    assert [a[4] for a in coins if a[1] == 4] == [0, 1, 2][: len([a for a in coins if a[1] == 4])]


class Recording(ChosenNoise):
    def uniform(self, seed, *, purpose, position, round_start):
        self.addresses.append((purpose, position, round_start))
        return CounterNoise().uniform(
            seed, purpose=purpose, position=position, round_start=round_start
        )

    def of_sibling(self, seed, *, purpose, position, round_start, node, index):
        self.addresses.append((purpose, position, round_start, node, index))
        return 0.5 + 0.1 * index if purpose is Purpose.CANDIDATE else 0.7


def test_numbers_of_siblings_differ_in_every_part_of_their_address():
    noise = CounterNoise()
    base = {"purpose": Purpose.CANDIDATE, "position": 9, "round_start": 7, "node": 3, "index": 1}
    others = [
        {"purpose": Purpose.CANDIDATE_COIN}, {"position": 10}, {"round_start": 8}, {"node": 4},
        {"index": 2}, {"index": 5}, {"node": 0},
    ]  # fmt: skip
    numbers = [noise.of_sibling(1, **base | other) for other in ({}, *others)]
    numbers += [noise.of_sibling(2, **base)]
    numbers += [
        noise.uniform(1, purpose=purpose, position=9, round_start=7)
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER, Purpose.BONUS)
    ]
    assert len(set(numbers)) == len(numbers)
    assert noise.of_sibling(1, **base) == CounterNoise().of_sibling(1, **base) == numbers[0]
    assert all(0.0 <= number < 1.0 for number in numbers)


# --- what is kept


def greatest_acceptance(draft, target, count):
    """p of the likeliest tokens, and of the rest what it shares with the draft's rest."""
    points = np.argsort(-draft, kind="stable")[: count - 1]
    rest = draft.copy()
    rest[points] = 0.0
    shared = np.minimum(target, rest / rest.sum() if rest.any() else rest)
    shared[points] = 0.0
    return float(target[points].sum() + shared.sum())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 3, 4, 6])
def test_no_candidates_of_a_node_are_kept_more_often(seed, count):
    draft, target = F1_DRAFT, F1_TARGET
    if seed is not None:
        draft, target = (random_row_of(seed + shift, 5, num_zeros=1)(()) for shift in (0, 100))
    found = acceptance(draft, target, count)
    assert found == pytest.approx(greatest_acceptance(draft, target, count), abs=MAX_ERROR)


def test_the_four_token_pair_gives_the_target():  # T19, T20
    probs = round_law(lambda _: F1_DRAFT, lambda _: F1_TARGET, (2,))
    first = [sum(m for run, m in probs.items() if run[0] == token) for token in range(4)]
    assert first == pytest.approx(F1_TARGET.tolist(), abs=MAX_ERROR)


def narrow_draft(prefix):
    """All tokens at the root, two of them further down: fewer branches to walk."""
    return random_row_of(31, 3, num_zeros=1 if prefix else 0)(prefix)


def wide_target(prefix):
    return 0.7 * random_row_of(32, 3)(prefix) + 0.1


def test_a_tree_gives_the_target():
    assert_is_targets(narrow_draft, wide_target, (2, 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_target_of_other_tokens_keeps_its_law(count):
    """Tokens that one of the rows lacks: residuals of point masses, and a draft with nothing left to draw from."""
    draft, target = np.array([0.0, 0.6, 0.3, 0.1]), np.array([0.5, 0.0, 0.2, 0.3])
    assert_is_targets(lambda _: draft, lambda _: target, (count,))


TOP = {"top_k": {"top_k": 2}, "top_p": {"top_p": 0.7}}


@pytest.mark.parametrize("top", TOP)
def test_truncated_rows_have_the_truncated_laws(top):
    """Laws of few ids, and laws with zeros."""

    def kept(prefix):
        row = wide_target(prefix)
        ranked = np.sort(row)[::-1]
        count = 2 if top == "top_k" else int(np.searchsorted(np.cumsum(ranked), 0.7)) + 1
        row = np.where(row >= ranked[count - 1], row, 0.0)
        return row / row.sum()

    assert_is_targets(
        narrow_draft,
        wide_target,
        (2,),
        expected=kept,
        params=SamplingParams(**TOP[top]),
    )


def test_penalties_and_temperature_follow_each_nodes_own_path():
    def penalised(prefix):
        row = np.array([0.5, 0.3]) ** 2 * np.exp(-2.0 * np.isin([0, 1], prefix) / 0.5)
        return row / row.sum()

    assert_is_targets(
        lambda _: np.array([0.4, 0.6]),
        lambda _: np.array([0.5, 0.3]),
        (2, 1),
        expected=penalised,
        params=SamplingParams(temperature=0.5, presence_penalty=2.0),
    )


def test_no_token_of_a_lenient_tree_exceeds_its_bound():
    target, kept = np.array([0.1, 0.1, 0.2, 0.6]), []
    for lenience in (1.0, 0.5):
        probs = round_law(
            lambda _: F1_DRAFT, lambda _: target, (2,), mode=LENIENT, lenience=lenience
        )
        first = np.array([sum(m for r, m in probs.items() if r[0] == t) for t in range(4)])
        assert (first <= target / lenience + MAX_ERROR).all()
        if lenience == 1.0:
            assert first == pytest.approx(target, abs=MAX_ERROR)
        kept.append(sum(m for run, m in probs.items() if len(run) == 2))
    assert kept[1] > kept[0] + 0.01


def test_lenience_1_is_bit_for_bit_the_exact_mode():
    noise = CounterNoise()
    for seed in range(30):
        runs = [
            run_of(*one_round(narrow_draft, wide_target, (3, 2), noise, seed=seed, **mode))
            for mode in ({}, {"mode": LENIENT, "lenience": 1.0})
        ]
        assert runs[0] == runs[1]


def test_a_smaller_draft_vocabulary_offers_what_it_has():
    sampler = sampler_for(4)
    row = grown(sampler, lambda _: F1_DRAFT, (4,), draft_vocab=2)
    assert sorted(row.draft_tokens) == [0, 1]
    verdict = judge(sampler, logits_of([F1_TARGET] * 3)[None], [row])[0]
    assert verdict.next_token is not None


# --- beside other rows


def test_greedy_and_seed_stable_rows_are_matched_whatever_was_drawn():
    for changes in ({"mode": SEED_STABLE}, {"params": SamplingParams(temperature=0.0)}):
        sampler = sampler_for(4)
        row = replace(grown(sampler, lambda _: F1_DRAFT, (2, 2)), **changes)
        logits = logits_of([F1_TARGET] * (len(row.draft_tokens) + 1))[None]
        found = judge(sampler, logits, [row])[0]
        plain = judge(sampler, logits, [replace(row, candidates=None, is_sampled_draft=False)])[0]
        assert found == plain


def test_rows_of_one_batch_are_judged_as_each_alone():
    def served(slots):
        sampler = sampler_for(4)
        rows = [
            grown(sampler, lambda _: F1_DRAFT, (2, 2), slot=0, index=0, seed=3),
            row_for((1, 2), slot=1, index=1, seed=4),
            replace(grown(sampler, lambda _: F1_DRAFT, (3,), slot=1, seed=5), index=1),
        ]
        logits = np.stack([logits_of([F1_TARGET] * 8)] * 2)
        return judge(sampler, logits, [rows[slot] for slot in slots])

    assert served([0, 1, 2]) == [served([i])[0] for i in range(3)]


def test_logprobs_follow_the_kept_path_and_choices_the_nodes():
    sampler = sampler_for(4)
    row = grown(sampler, lambda _: F1_DRAFT, (4, 1), seed=2)
    row = replace(row, num_logprobs=1, num_choices=1)
    logits = np.random.default_rng(1).normal(size=(1, 9, 4)).astype(np.float32)
    verdict = judge(sampler, logits, [row])[0]
    nodes = (0, *verdict.path)
    assert verdict.num_accepted == len(verdict.path) > 0
    assert [one.top[0][0] for one in verdict.logprobs] == [
        int(logits[0, node].argmax()) for node in nodes
    ]
    assert verdict.choices == tuple((int(t),) for t in logits[0].argmax(axis=-1))


def test_logprobs_of_a_tree_are_those_of_its_nodes_and_not_of_their_depth():
    """Every token's log-probability is the log-softmax of its own node's row, also off the leading chain."""
    num_off_chain = 0
    for seed in range(12):
        sampler = sampler_for(4)
        row = replace(grown(sampler, lambda _: F1_DRAFT, (4, 1), seed=seed), num_logprobs=1)
        logits = np.random.default_rng(seed).normal(size=(1, 9, 4)).astype(np.float32)
        verdict = judge(sampler, logits, [row])[0]
        nodes = (0, *verdict.path)
        rows = logits[0, nodes, :].astype(np.float64)
        laws = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        expected = [law[token] for law, token in zip(laws, run_of(row, verdict), strict=True)]
        found = [one.logprob for one in verdict.logprobs]
        assert np.allclose(found, expected, rtol=0.0, atol=1e-6)
        num_off_chain += verdict.path != tuple(range(1, len(verdict.path) + 1))
    assert num_off_chain >= 4


def test_rows_that_are_not_finite_matter_on_the_path_alone():
    sampler = sampler_for(4)
    row = grown(sampler, lambda _: F1_DRAFT, (4,))
    logits = np.full((1, 5, 4), -20.0, dtype=np.float32)
    logits[0, :, 2] = 20.0
    kept = row.draft_tokens.index(2) + 1
    logits[0, [n for n in range(1, 5) if n != kept]] = np.nan
    assert judge(sampler, logits, [row])[0].path == (kept,)
    logits[0, kept] = np.nan
    verdict = judge(sampler, logits, [row])[0]
    assert (verdict.path, verdict.next_token) == ((), None)


def test_equal_rows_leave_the_target_behind_and_say_so():
    """The coin of 1 that noise never gives: what is left of equal rows is rounding."""

    class Ones(Recording):
        def of_sibling(self, seed, *, purpose, position, round_start, node, index):
            return 0.5 if purpose is Purpose.CANDIDATE else 1.0

    _, verdict = one_round(lambda _: F1_TARGET, lambda _: F1_TARGET, (1,), Ones())
    assert (verdict.path, verdict.num_fallbacks) == ((), 1)
    assert verdict.next_token is not None


def test_a_coin_of_zero_does_not_keep_an_impossible_candidate():
    class Zeros(Recording):
        def of_sibling(self, seed, *, purpose, position, round_start, node, index):
            return 0.0

    impossible = np.array([0.0, 0.4, 0.3, 0.3])
    row, verdict = one_round(lambda _: F1_DRAFT, lambda _: impossible, (1,), Zeros())
    assert (tuple(row.draft_tokens), row.candidates[0], verdict.path) == ((0,), (1,), ())
    assert verdict.next_token != 0
