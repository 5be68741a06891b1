"""Repeated n-grams are banned as Transformers bans them, and emitted tokens have the banned target's law."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from outrider.engines.sampling import adjust
from outrider.engines.sampling.adjust import ngram_ends, process_logits
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.oracle import sampling as oracle
from outrider.runtime.oracle.block import emitted_probs_block
from outrider.runtime.oracle.sampling import adjusted_probs, processed_scores
from outrider.runtime.oracle.verification import emitted_probs
from transformers import NoRepeatNGramLogitsProcessor

from tests.engines.rows import row_for
from tests.engines.sampling import test_candidates, test_cpu_sampler
from tests.mutants import assert_caught
from tests.runtime.oracle.laws import distance, random_row_of

MAX_ERROR = 1e-6
V = 3
# Prompt and output; an n-gram may lie in either, or across.
HISTORY, NUM_PROMPT = np.array([0, 1, 2, 0, 1], dtype=np.int64), 3
SIZES = (1, 2, 3)
MODES = (ExactnessMode.MAX_ACCEPT, ExactnessMode.SEED_STABLE)


def fast_bans(tokens, size, vocab_size=V, num_prompt=0):
    """Tokens that the sampler bans."""
    params = SamplingParams(no_repeat_ngram_size=size)
    logits = np.zeros(vocab_size, dtype=np.float32)
    history = np.array(tokens, dtype=np.int64)
    return set(np.flatnonzero(np.isinf(process_logits(logits, params, history, num_prompt))))


def slow_bans(tokens, size, vocab_size=V, num_prompt=0):
    """Tokens that the oracle bans."""
    params = SamplingParams(no_repeat_ngram_size=size)
    history = np.array(tokens, dtype=np.int64)
    scores = processed_scores(np.zeros(vocab_size), params, history, num_prompt)
    return set(np.flatnonzero(np.isinf(scores)))


both = pytest.mark.parametrize("bans", [fast_bans, slow_bans], ids=["fast", "slow"])


@both
def test_worked_examples(bans):
    assert bans([0, 1, 0], 2) == {1}
    assert bans([0, 1, 0, 2, 0], 2) == {1, 2}
    assert bans([0, 1, 2, 0, 1], 3) == {2}
    assert bans([0, 1, 1], 3) == set()
    assert bans([1, 1], 2) == {1}
    # Too short for an n-gram, and for what comes before its last token.
    for size in range(2, 11):
        assert bans([1], size) == bans([], size) == set()


@both
def test_the_prompt_counts_whoever_wrote_it(bans):
    for num_prompt in range(5):
        assert bans([0, 1, 2, 0], 2, num_prompt=num_prompt) == {1}


@both
def test_of_size_one_no_token_comes_twice(bans):
    assert bans([2, 0], 1) == {0, 2}


@both
def test_where_nothing_else_is_left_nothing_is_banned(bans):
    assert bans([2, 0, 1], 1) == set()
    assert bans([0, 1, 0, 2, 0, 0], 2) == set()


@pytest.mark.parametrize("probs_of", [process_logits, processed_scores])
def test_what_other_bans_leave_is_not_banned_all(probs_of):
    """Of 0, 1 and 2 one is not allowed, one a bad word, and one ends too early."""
    params = SamplingParams(
        allowed_token_ids=(0, 1, 2, 3),
        bad_words=((0,),),
        min_tokens=9,
        end_token_ids=(2,),
        no_repeat_ngram_size=1,
    )
    logits = np.arange(5, dtype=np.float32)
    for tokens, left in (([1], [3]), ([1, 3], [1, 3]), ([4, 4], [1, 3])):
        history = np.array(tokens, dtype=np.int64)
        found = np.array(probs_of(logits, params, history, 0))
        assert np.flatnonzero(np.isfinite(found)).tolist() == left
        assert found[left].tolist() == left


def test_bans_are_those_of_transformers():
    """Where Transformers leaves no token, this bans none."""
    rng = np.random.default_rng(7)
    num_bans = 0
    for _ in range(300):
        size, vocab_size = int(rng.integers(1, 6)), int(rng.integers(2, 8))
        tokens = rng.integers(0, vocab_size, int(rng.integers(0, 80)))
        processor = NoRepeatNGramLogitsProcessor(size)
        scores = processor(torch.from_numpy(tokens)[None], torch.zeros(1, vocab_size))[0]
        expected = set(np.flatnonzero(np.isinf(scores.numpy())))
        assert set(ngram_ends(tokens, size)) == expected
        banned = set() if len(expected) == vocab_size else expected
        assert fast_bans(tokens, size, vocab_size) == banned == slow_bans(tokens, size, vocab_size)
        num_bans += bool(banned)
    assert num_bans > 60


def test_a_smaller_draft_vocabulary_knows_no_other_tokens():
    assert fast_bans([5, 1, 5], 2) == {1}
    assert fast_bans([1, 5, 1], 2) == set()


def banned_row_of(row_of, size, history=HISTORY):
    """[V] float64 of the oracle after a draft's tokens."""
    params = SamplingParams(no_repeat_ngram_size=size)

    def row(prefix):
        tokens = np.array([*history, *prefix], dtype=np.int64)
        return adjusted_probs(np.log(row_of(prefix)), params, tokens, NUM_PROMPT)

    return row


def options(size, **changes):
    params = SamplingParams(no_repeat_ngram_size=size, **changes)
    return {"params": params, "history": HISTORY, "num_prompt": NUM_PROMPT}


PAIR = random_row_of(3, V), random_row_of(53, V)


@pytest.mark.parametrize("size", SIZES)
def test_a_chain_has_the_law_of_the_banned_target(size):
    """Two drafted tokens, of which the first may begin or end an n-gram."""
    expected = emitted_probs(*(banned_row_of(row_of, size) for row_of in PAIR), 2)
    found = test_cpu_sampler.round_law(*PAIR, 2, **options(size))
    assert distance(found, expected) < MAX_ERROR


@pytest.mark.parametrize("size", SIZES)
def test_a_block_has_the_law_of_the_banned_target(size):
    expected = emitted_probs_block(*(banned_row_of(row_of, size) for row_of in PAIR), 2)
    found = test_cpu_sampler.round_law(*PAIR, 2, verifies_block=True, **options(size))
    assert distance(found, expected) < MAX_ERROR


def test_a_tree_of_candidates_has_the_law_of_the_banned_target():
    draft, target = PAIR
    expected = banned_row_of(target, 2)
    test_candidates.assert_is_targets(draft, target, (2, 1), expected, **options(2))


def decoded(gamma, size, mode, seed, *, temperature):
    """Tokens behind ``HISTORY``; drafts are sampled from another model."""
    draft, target = random_row_of(seed, 5), random_row_of(seed + 50, 5)
    params = SamplingParams(temperature=temperature, no_repeat_ngram_size=size)
    sampler = CpuSampler(max_batch=1, max_gamma=4, vocab_size=5)
    history = list(HISTORY)
    while len(history) < len(HISTORY) + 12:
        row = row_for(
            params=params,
            mode=mode,
            seed=seed,
            history=np.array(history, dtype=np.int64),
            num_prompt=NUM_PROMPT,
        )
        tokens = history[len(HISTORY) :]
        drafted = ()
        for _ in range(gamma):
            logits = np.log(draft((*tokens, *drafted)))[None, None].astype(np.float32)
            asked = [replace(row, draft_tokens=drafted)]
            drafted = (*drafted, *sampler.propose(logits, asked, vocab_size=5))
        rows = [target((*tokens, *drafted[:at])) for at in range(gamma + 1)]
        is_sampled = gamma > 0 and temperature > 0 and mode is ExactnessMode.MAX_ACCEPT
        judged = replace(row, draft_tokens=drafted, is_sampled_draft=is_sampled)
        (verdict,) = sampler.judge(np.log(np.array(rows))[None].astype(np.float32), [judged])
        history.extend((*drafted[: verdict.num_accepted], verdict.next_token))
    return history[: len(HISTORY) + 12]


@pytest.mark.parametrize(("mode", "temperature"), [*product(MODES, (0.0, 1.0))])
def test_no_ngram_of_an_answer_comes_twice(mode, temperature):
    """Five tokens make 25 pairs, and prompt and answer have 16 of them."""
    for seed, size, gamma in product(range(6), (2, 3), (0, 1, 4)):
        tokens = decoded(gamma, size, mode, seed, temperature=temperature)
        # HISTORY has (0, 1) twice itself.
        ends = range(len(HISTORY), len(tokens))
        for end in ends:
            known = {tuple(tokens[at : at + size]) for at in range(end - size + 1)}
            assert tuple(tokens[end - size + 1 : end + 1]) not in known
        if mode is ExactnessMode.SEED_STABLE or temperature == 0.0:
            assert tokens == decoded(0, size, mode, seed, temperature=temperature)


MUTANTS = {
    "n too small by one": (
        adjust,
        "ngram_ends(history, params.no_repeat_ngram_size)",
        "ngram_ends(history, max(params.no_repeat_ngram_size - 1, 1))",
        "worked examples",
    ),
    "n too great by one": (
        adjust,
        "ngram_ends(history, params.no_repeat_ngram_size)",
        "ngram_ends(history, params.no_repeat_ngram_size + 1)",
        "worked examples",
    ),
    "the first token of an n-gram not compared": (
        adjust,
        "range(2, size)",
        "range(2, size - 1)",
        "transformers",
    ),
    "only the last token of an n-gram compared": (
        adjust,
        "tokens[places - back] == tokens[-back]",
        "tokens[places - back] == tokens[places - back]",
        "transformers",
    ),
    "the prompt not counted": (
        adjust,
        "ngram_ends(history, ",
        "ngram_ends(output, ",
        "prompt",
    ),
    "the draft not counted": (
        adjust,
        "row.draft_tokens[:num_drafted]",
        "row.draft_tokens[:0]",
        "chain",
    ),
    "the draft counted one token too far": (
        adjust,
        "row.draft_tokens[:num_drafted]",
        "row.draft_tokens[: num_drafted + 1]",
        "chain",
    ),
    "nothing left to draw": (adjust, "processed.max() == -np.inf", "False", "nothing left"),
    "the oracle's prompt not counted": (
        oracle,
        "_without_repeats(scores, params.no_repeat_ngram_size, everything)",
        "_without_repeats(scores, params.no_repeat_ngram_size, output)",
        "oracle's prompt",
    ),
    "the oracle's n too small by one": (
        oracle,
        "len(tokens) - size + 1 :]",
        "len(tokens) - size + 2 :]",
        "transformers",
    ),
}
KILLERS = {
    "worked examples": lambda: test_worked_examples(fast_bans),
    "transformers": test_bans_are_those_of_transformers,
    "prompt": lambda: test_the_prompt_counts_whoever_wrote_it(fast_bans),
    "oracle's prompt": lambda: test_the_prompt_counts_whoever_wrote_it(slow_bans),
    "chain": lambda: test_a_chain_has_the_law_of_the_banned_target(2),
    "nothing left": lambda: test_where_nothing_else_is_left_nothing_is_banned(fast_bans),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_repeated_ngrams_is_caught(monkeypatch, name):
    module, old, new, killer = MUTANTS[name]
    assert_caught(monkeypatch, module, old, new, KILLERS[killer], (AssertionError, IndexError))
