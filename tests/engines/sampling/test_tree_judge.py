"""The judge of trees: the law by enumeration of its noise, and plain decoding's very answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import Purpose
from outrider.engines.sampling.tree_judge import judge
from outrider.engines.trees import path_to
from outrider.runtime.oracle.tree_walks import match_walk
from outrider.runtime.oracle.verification import completed, sequence_probs

from tests.draft_trees import merge_chains, tokens_of
from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import law_of
from tests.runtime.oracle.laws import distance, random_row_of

MAX_ERROR = 1e-6
V = 4
CHAINS = [[(0, 1), (0, 2), (3,)], [(1, 1, 1), (2, 0), (1, 3)], [(3, 2), (3, 2), (0,)]]
MODES = tuple(ExactnessMode)


def tree_row(tree, **changes):
    return row_for(tree.tokens, **({"parents": tree.parents, "seed": 5} | changes))


def logits_of(tree, row_of):
    """[N + 1, V] float32: what the target says after every node."""
    prefixes = [
        tokens_of(tree, path_to(node, tree.parents)[1:]) for node in range(len(tree.tokens) + 1)
    ]
    with np.errstate(divide="ignore"):
        return np.log(np.array([row_of(prefix) for prefix in prefixes])).astype(np.float32)


def sampler_for(noise=None):
    return CpuSampler(max_batch=4, max_gamma=8, vocab_size=V, noise=noise)


class Trailing(CpuSampler):
    """Leaves what it draws in the trail, so that the walk of the noise tells branches apart."""

    def __init__(self, noise):
        super().__init__(max_batch=1, max_gamma=8, vocab_size=V, noise=noise)
        self.noise = noise

    def judge(self, logits, rows):
        verdicts = super().judge(logits, rows)
        self.noise.trail.extend(verdict.next_token for verdict in verdicts)
        return verdicts


def plain_tokens(row, row_of, count):
    """Plain decoding of ``count`` tokens, one at a time."""
    sampler, tokens = sampler_for(), []
    for _ in range(count):
        with np.errstate(divide="ignore"):
            logits = np.log(row_of(tuple(tokens)))[None, None].astype(np.float32)
        here = replace(
            row,
            draft_tokens=(),
            parents=None,
            history=np.array([*row.history, *tokens], dtype=np.int64),
        )
        tokens.append(sampler.judge(logits, [here])[0].next_token)
    return tuple(tokens)


@pytest.mark.parametrize("chains", CHAINS)
def test_the_law_of_a_round_is_the_targets(chains):
    tree, random_row = merge_chains(chains), random_row_of(21, V)

    def target(prefix):  # no token so rare that the walk of the noise steps over it
        return 0.6 * random_row(prefix) + 0.1

    logits = logits_of(tree, target)[None]

    def emitted(noise):
        verdict = judge(Trailing(noise), logits, [tree_row(tree)])[0]
        assert {purpose for purpose, *_ in noise.addresses} == {Purpose.MATCH}
        positions = [position for _, position, _ in noise.addresses]
        assert positions == list(range(1, len(verdict.path) + 2))
        return (*tokens_of(tree, verdict.path), verdict.next_token)

    probs = law_of(emitted)
    assert max(map(len, probs)) > 1
    length = max(map(len, probs))
    assert distance(completed(probs, target, length), sequence_probs(target, length)) < MAX_ERROR


LAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "truncated": SamplingParams(temperature=0.7, top_k=3, top_p=0.9),
    "penalties": SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "bans": SamplingParams(bad_words=((0, 1),), min_tokens=3, end_token_ids=(2,)),
    "n-grams": SamplingParams(no_repeat_ngram_size=2),
    "greedy n-grams": SamplingParams(temperature=0.0, no_repeat_ngram_size=1),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=3.0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAWS)
def test_a_tree_answers_as_plain_decoding_does(name, mode):
    """Whatever the tree, processors follow the path; lenience accepts nothing more of a tree."""
    num_kept = 0
    for seed in range(12):
        target = random_row_of(seed, V)
        rng = np.random.default_rng(seed)
        chains = [tuple(rng.integers(0, V, 3)) for _ in range(5)]
        tree = merge_chains([tuple(map(int, chain)) for chain in chains])
        row = tree_row(tree, params=LAWS[name], mode=mode, lenience=0.5, seed=seed)
        verdict = judge(sampler_for(), logits_of(tree, target)[None], [row])[0]
        run = (*tokens_of(tree, verdict.path), verdict.next_token)
        assert run == plain_tokens(row, target, len(run))
        assert verdict.num_accepted == len(verdict.path)
        num_kept += len(verdict.path)
    assert num_kept > 5


def test_the_walk_is_the_oracles():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tree = merge_chains([tuple(map(int, rng.integers(0, V, 3))) for _ in range(4)])
        logits = rng.normal(size=(1, len(tree.tokens) + 1, V)).astype(np.float32)
        row = tree_row(tree, params=SamplingParams(temperature=0.0))
        verdict = judge(sampler_for(), logits, [row])[0]
        assert (verdict.path, verdict.next_token) == match_walk(tree, logits[0].argmax(axis=-1))


def test_a_tree_that_is_a_chain_has_the_chains_verdict():
    chain = merge_chains([(1, 2, 3)])
    for seed in range(10):
        logits = logits_of(chain, random_row_of(seed, V))[None]
        row = tree_row(chain, seed=seed, num_logprobs=2, num_choices=2)
        found = judge(sampler_for(), logits, [row])[0]
        expected = sampler_for().judge(logits, [replace(row, parents=None)])[0]
        assert replace(found, path=()) == expected


def test_choices_are_told_of_every_node_and_logprobs_of_the_path():
    tree = merge_chains([(1, 2), (3,)])
    logits = np.zeros((1, 4, V), dtype=np.float32)
    for node, token in enumerate((3, 0, 0, 2)):
        logits[0, node, token] = 5.0
    row = tree_row(tree, params=SamplingParams(temperature=0.0), num_choices=1, num_logprobs=1)
    verdict = judge(sampler_for(), logits, [row])[0]
    assert (verdict.path, verdict.next_token) == ((3,), 2)
    assert verdict.choices == ((3,), (0,), (0,), (2,))
    assert [one.top[0][0] for one in verdict.logprobs] == [3, 2]


def test_rows_of_one_batch_are_chains_trees_or_nothing():
    tree, target = merge_chains([(0, 1), (0, 2), (3,)]), random_row_of(4, V)
    of_tree = logits_of(tree, target)
    logits = np.stack([of_tree, of_tree[::-1], of_tree])
    rows = [
        tree_row(tree, index=2, slot=2, seed=1),
        tree_row(tree, index=1, slot=1, seed=2, draft_tokens=(1, 2), parents=None),
        tree_row(tree, index=0, slot=0, seed=3, draft_tokens=(), parents=None),
        tree_row(tree, index=0, slot=0, seed=4),
    ]
    together = judge(sampler_for(), logits, rows)
    alone = [judge(sampler_for(), logits, [row])[0] for row in rows]
    assert together == alone
    assert together[0].path
    assert [verdict.path for verdict in together[1:3]] == [(), ()]
    assert judge(sampler_for(), logits, rows[1:3]) == together[1:3]
    assert judge(sampler_for(), logits, rows[:1]) == together[:1]


def test_rows_that_are_not_finite_matter_on_the_path_alone():
    tree = merge_chains([(1, 2), (3,)])
    logits = np.zeros((1, 4, V), dtype=np.float32)
    logits[0, 0, 1] = logits[0, 1, 0] = 5.0
    row = tree_row(tree, params=SamplingParams(temperature=0.0))
    logits[0, 3] = np.nan
    assert judge(sampler_for(), logits, [row])[0].next_token == 0
    logits[0, 1] = np.nan
    verdict = judge(sampler_for(), logits, [row])[0]
    assert (verdict.path, verdict.num_accepted, verdict.next_token) == ((), 0, None)
