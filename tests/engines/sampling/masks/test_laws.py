"""Rows with token masks: what a mask is, the laws of masked rounds by enumeration, and rows that leave nothing to draw.

The grammar of the enumerations has six tokens; what may follow depends on all tokens behind the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from outrider.engines.sampling.adjust import process_logits
from outrider.engines.sampling.base import CandidateNode, ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.kernels import write_masked
from outrider.engines.sampling.noise import CounterNoise
from outrider.engines.sampling.tree_judge import judge
from outrider.runtime.oracle.block import emitted_probs_block
from outrider.runtime.oracle.sampling import adjusted_probs, processed_scores
from outrider.runtime.oracle.verification import (
    completed,
    emitted_probs,
    point_mass,
    sequence_probs,
)

from tests.engines.rows import PROMPT, masks_at, row_for
from tests.engines.sampling import test_candidates, test_cpu_sampler
from tests.engines.sampling.chosen_noise import law_of
from tests.engines.sampling.mixed_batches import drafted_by, mixed_rows
from tests.engines.sampling.test_cpu_sampler import logits_of, masks_to, run_of, sampler_for
from tests.runtime.oracle.laws import distance, random_row_of

V = 6
MAX_ERROR = 1e-6
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GREEDY = SamplingParams(temperature=0.0)


def spread(seed):
    """Random rows without small probabilities: walks of noise must see every token."""
    return lambda prefix: 0.6 * random_row_of(seed, V)(prefix) + 0.4 / V


DRAFT, TARGET = spread(21), spread(22)


def words_of(bits):
    """[ceil(V / 32)] int32 of one truth value per token."""
    padded = np.zeros(-(-len(bits) // 32) * 32, dtype=bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)


SHIFTS = (0, 1, 1, 1, 2, 2)


def grammar(*parts):
    """One token of so many may follow, by length of the text; which ones depends on all of it."""

    def mask_of(prefix):
        part = parts[min(len(prefix), len(parts) - 1)]
        return words_of((np.arange(V) + sum(1 + SHIFTS[token] for token in prefix)) % part == 0)

    return mask_of


HALF, FEWER, FEW = grammar(2), grammar(2, 3, 6), grammar(3, 6)


def legal(row_of, mask_of, params=SamplingParams()):  # noqa: B008  a frozen value
    """[V] float64 of the oracle behind a draft's tokens."""

    def row(prefix):
        history = np.array([*PROMPT, *prefix])
        with np.errstate(divide="ignore"):
            logits = np.log(row_of(prefix))
        return adjusted_probs(logits, params, history, len(PROMPT), mask_of(prefix))

    return row


# --- what a mask is


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70, 128])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_bit_is_that_of_its_token(vocab_size, dtype):
    generator = np.random.default_rng(vocab_size)
    for share in (0.0, 0.5, 1.0):
        logits = generator.normal(size=vocab_size).astype(np.float32)
        bits = generator.random(vocab_size) < share
        masks = words_of(bits)
        masks.flags.writeable = False
        masked = np.zeros(vocab_size, dtype)
        write_masked(logits, masks, masked)
        assert masked.tolist() == np.where(bits, logits, -np.inf).tolist()


def test_a_mask_of_a_smaller_vocabulary_is_refused():
    with pytest.raises(IndexError, match="smaller vocabulary"):
        write_masked(np.zeros(33, np.float32), words_of(np.ones(32)), np.zeros(33))


def masked_rows(seed):
    """Rows of every kind without masks, and the same with; their logits; all with token 5, which nothing else bans."""
    generator = np.random.default_rng(seed)
    gamma = seed % 4
    plain = mixed_rows(generator, 8, generator.integers(0, 8, 12))
    plain = [
        replace(row, num_logprobs=None, verifies_block=generator.random() < 0.5) for row in plain
    ]
    plain[0] = replace(plain[0], params=SamplingParams(top_p=0.9), verifies_block=False)
    plain[1] = replace(plain[1], params=GREEDY)
    bits = generator.random((len(plain), gamma + 1, 8)) < 0.5
    bits[:, :, 5] = True
    draft = generator.normal(scale=2, size=(gamma, len(plain), 2, 8)).astype(np.float32)
    target = generator.normal(scale=2, size=(len(plain), gamma + 1, 8)).astype(np.float32)
    if seed % 3 == 1:
        draft[:, :, 0] = target[:, :gamma].swapaxes(0, 1)
    return plain, bits, draft, target


def check_masks_are_banned_logits(seed, noise=None):
    """A chain: draft tokens and verdicts are those of logits that are -inf from the start."""
    plain, bits, draft, target = masked_rows(seed)
    masks = [np.stack([words_of(row) for row in rows]) for rows in bits]
    masked = [replace(row, masks=rows) for row, rows in zip(plain, masks, strict=True)]
    banned_draft = draft.copy()
    for depth in range(len(draft)):
        banned_draft[depth, :, 0] = np.where(bits[:, depth], draft[depth, :, 0], -np.inf)
    verdicts = []
    for rows, drafting, judging in (
        (plain, banned_draft, np.where(bits, target, -np.inf).astype(np.float32)),
        (masked, draft, target),
    ):
        sampler = sampler_for(8, noise)
        drafts = drafted_by(sampler, rows, drafting, 8)
        is_sampled = len(draft) > 0 and seed % 3 > 0
        judged = [
            replace(
                row,
                draft_tokens=drafted,
                is_sampled_draft=is_sampled
                and not row.params.is_greedy
                and row.mode is not SEED_STABLE,
            )
            for row, drafted in zip(rows, drafts, strict=True)
        ]
        verdicts.append((drafts, sampler.judge(judging, judged)))
    assert verdicts[0] == verdicts[1]
    assert all(verdict.next_token is not None for verdict in verdicts[0][1])


def check_chains():
    for seed in range(40):
        check_masks_are_banned_logits(seed)


def test_a_mask_acts_as_logits_banned_before_anything_else():
    check_chains()
    for seed in range(20):
        check_masks_are_banned_logits(seed, CounterNoise())


@pytest.mark.parametrize("mode", [MAX_ACCEPT, LENIENT, SEED_STABLE, "greedy", "point masses"])
def test_the_mask_of_a_trees_node_acts_as_logits_banned_there(mode):
    check_trees(mode)


def check_trees(mode):
    """Trees of depth 2, their children drawn from column 1."""
    options = {"mode": mode if isinstance(mode, ExactnessMode) else MAX_ACCEPT, "lenience": 0.6}
    options["params"] = SamplingParams(presence_penalty=0.7, top_p=0.9)
    if mode == "greedy":
        options["params"] = SamplingParams(temperature=0.0, presence_penalty=0.7)
    for seed in range(12):
        found = []
        for is_masked in (False, True):
            sampler = sampler_for(V)
            changes = options | {"seed": seed, "slot": 0}
            mask_of, draft, target = HALF, DRAFT, TARGET
            if not is_masked:
                mask_of, draft, target = None, legal(DRAFT, HALF), legal(TARGET, HALF)
            drawn = replace_mode(changes)
            row = test_candidates.grown(sampler, draft, (2, 2), mask_of=mask_of, **drawn)
            row = replace(row, **changes)
            if mode == "point masses":
                row = replace(row, candidates=None, is_sampled_draft=False)
            paths = [
                test_candidates.tokens_to(row, node) for node in range(len(row.draft_tokens) + 1)
            ]
            with np.errstate(divide="ignore"):
                logits = np.log([target(path) for path in paths]).astype(np.float32)[None]
            found.append((row.draft_tokens, judge(sampler, logits, [row])[0]))
        assert found[0] == found[1]
        assert found[0][1].next_token is not None


def replace_mode(changes):
    """How the candidates of a greedy or seed_stable row are drawn all the same."""
    params = changes["params"]
    params = replace(params, temperature=1.0) if params.is_greedy else params
    return changes | {"mode": MAX_ACCEPT, "params": params}


def test_children_are_drawn_under_the_mask_of_their_column():
    sampler = sampler_for(V)
    masks = np.stack([HALF((0,)), HALF(())])
    for column, allowed in ((0, {1, 3, 5}), (1, {0, 2, 4})):
        row = row_for((), masks=masks)
        logits = np.zeros((1, 2, V), dtype=np.float32)
        point = CandidateNode(row=row, column=column, node=0, count=V)
        assert set(sampler.propose_children(logits, [point], vocab_size=V)[0]) == allowed


def test_a_smaller_draft_vocabulary_reads_the_bits_it_has():
    sampler = sampler_for(40)
    masks = words_of(np.arange(40) >= 3)[None]
    logits = np.zeros((1, 1, 5), dtype=np.float32)
    for params, mode in product((SamplingParams(), GREEDY), (MAX_ACCEPT, SEED_STABLE)):
        tokens = {
            sampler.propose(
                logits, [row_for(masks=masks, seed=s, params=params, mode=mode)], vocab_size=40
            )[0]
            for s in range(20)
        }
        assert tokens == ({3} if params.is_greedy else {3, 4})


def test_raw_log_probabilities_and_choices_do_not_see_the_mask():
    row = row_for(masks=words_of([False, True, True])[None], num_logprobs=3, num_choices=1)
    logits = logits_of([0.7, 0.2, 0.1])
    (verdict,) = sampler_for(3).judge(logits, [row])
    assert verdict.next_token in (1, 2)
    assert verdict.choices == ((0,),)
    assert verdict.logprobs[0].logprob == pytest.approx(np.log([0.2, 0.1][verdict.next_token - 1]))


# --- the laws of masked rounds


def check_ratio_law():
    """Two drafted tokens, judged one by one."""
    expected = emitted_probs(legal(DRAFT, FEWER), legal(TARGET, FEWER), 2)
    found = test_cpu_sampler.round_law(DRAFT, TARGET, 2, mask_of=FEWER)
    assert distance(found, expected) < MAX_ERROR
    whole = legal(TARGET, FEWER)
    assert distance(completed(found, whole, 3), sequence_probs(whole, 3)) < MAX_ERROR


def test_a_masked_chain_has_the_law_of_the_masked_target():
    check_ratio_law()


def check_block_law():
    expected = emitted_probs_block(legal(DRAFT, FEWER), legal(TARGET, FEWER), 2)
    found = test_cpu_sampler.round_law(DRAFT, TARGET, 2, mask_of=FEWER, verifies_block=True)
    assert distance(found, expected) < MAX_ERROR


def test_a_masked_block_has_the_law_of_the_masked_target():
    check_block_law()


@pytest.mark.parametrize("verifies_block", [False, True])
def test_a_draft_that_was_not_masked_is_judged_exactly_too(verifies_block):
    """The mask of the target rejects what it must; only tokens are wasted."""

    def judged(noise):
        sampler = sampler_for(V, noise)
        row = row_for(verifies_block=verifies_block)
        (token,) = sampler.propose(logits_of(DRAFT(())), [row], vocab_size=V)
        noise.trail.append(token)
        row = replace(row, draft_tokens=(token,), is_sampled_draft=True)
        row = replace(row, masks=masks_to((token,), HALF))
        return run_of(row, sampler.judge(logits_of(TARGET(()), TARGET((token,))), [row])[0])

    expected = emitted_probs(DRAFT, legal(TARGET, HALF), 1)
    assert distance(law_of(judged), expected) < MAX_ERROR


@pytest.mark.parametrize(
    "params", [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.6}, {"presence_penalty": 2.0}]
)
def test_a_mask_comes_before_everything_else(params):
    options = SamplingParams(**params)
    expected = emitted_probs(legal(DRAFT, HALF, options), legal(TARGET, HALF, options), 1)
    found = test_cpu_sampler.round_law(DRAFT, TARGET, 1, mask_of=HALF, params=options)
    assert distance(found, expected) < MAX_ERROR


@pytest.mark.parametrize("mode", [MAX_ACCEPT, LENIENT])
def test_masked_point_masses_have_their_law(mode):
    """One that may follow, and one that may not."""
    lenience = 0.5 if mode is LENIENT else 1.0
    for token in (2, 3):
        rows = [TARGET(()), TARGET((token,))]
        expected = emitted_probs(
            lambda _, token=token: point_mass(token, V), legal(TARGET, HALF), 1, lenience=lenience
        )
        found = test_cpu_sampler.judged_law(
            (token,), rows, mode=mode, lenience=lenience, masks=masks_to((token,), HALF)
        )
        assert distance(found, expected) < MAX_ERROR


def test_a_masked_lenient_round_has_the_oracles_law():
    expected = emitted_probs(legal(DRAFT, HALF), legal(TARGET, HALF), 1, lenience=0.5)
    found = test_cpu_sampler.round_law(DRAFT, TARGET, 1, mask_of=HALF, mode=LENIENT, lenience=0.5)
    assert distance(found, expected) < MAX_ERROR


def test_a_masked_tree_has_the_law_of_the_masked_target():
    test_candidates.assert_is_targets(DRAFT, TARGET, (2, 1), legal(TARGET, FEW), mask_of=FEW)


def test_lenient_greedy_keeps_no_token_that_may_not_follow():
    options = {"params": GREEDY, "mode": LENIENT, "lenience": 1e-6}
    rows = [[0.1, 0.1, 0.4, 0.4], [0.1, 0.1, 0.4, 0.4]]
    for token in range(4):
        masks = np.stack([words_of([True, True, False, True])] * 2)
        verdict = test_cpu_sampler.judged((token,), rows, None, masks=masks, **options)
        assert (verdict.num_accepted, verdict.next_token) == (int(token != 2), 3)


# --- the tokens of plain decoding


def decoded(gamma, seed, *, drafter="model", **options):
    """Tokens of a whole answer, three rounds or more."""
    sampler, tokens = sampler_for(V), ()
    while len(tokens) < 9:
        history = np.array([*PROMPT, *tokens])
        base = row_for(seed=seed, history=history, **options)
        ahead = lambda prefix, tokens=tokens: HALF((*tokens, *prefix))  # noqa: E731
        drafted = ()
        for _ in range(gamma):
            if drafter == "guess":
                drafted = (*drafted, (seed + len(tokens) + 2 * len(drafted)) % V)
                continue
            row = replace(base, draft_tokens=drafted, masks=masks_to(drafted, ahead))
            logits = logits_of(DRAFT((*tokens, *drafted)))
            drafted = (*drafted, *sampler.propose(logits, [row], vocab_size=V))
        parents = None
        prefixes = [drafted[:index] for index in range(gamma + 1)]
        if drafter == "tree":  # the chain, and beside its first token all others
            others = [token for token in range(V) if token != drafted[0]]
            parents = (*range(gamma), *[0] * len(others))
            prefixes += [(token,) for token in others]
            drafted = (*drafted, *others)
        masks = masks_at(ahead, prefixes)
        row = replace(base, draft_tokens=drafted, parents=parents, masks=masks)
        logits = logits_of(*[TARGET((*tokens, *prefix)) for prefix in prefixes])
        (verdict,) = judge(sampler, logits, [row])
        kept = prefixes[verdict.path[-1]] if verdict.path else drafted[: verdict.num_accepted]
        tokens = (*tokens, *kept, verdict.next_token)
    return tokens[:9]


def check_decoding():
    greedy = {"params": GREEDY}
    for seed, options in product(range(4), (greedy, {"mode": SEED_STABLE}, {})):
        plain = decoded(0, seed, **options)
        for at, token in enumerate(plain):
            assert HALF(plain[:at])[0] >> token & 1
        for gamma in (1, 3):
            for drafter in ("guess", "tree", *(["model"] if options else [])):
                assert decoded(gamma, seed, drafter=drafter, **options) == plain


def test_answers_under_masks_are_those_of_plain_decoding_whatever_is_drafted():
    check_decoding()


# --- rows that leave nothing to draw


def only(*tokens):
    return words_of(np.isin(np.arange(V), tokens))


@pytest.mark.parametrize("scores_of", [process_logits, processed_scores])
def test_an_end_that_the_mask_leaves_alone_is_not_banned(scores_of):
    params = SamplingParams(min_tokens=2, end_token_ids=(4, 5))
    logits = np.arange(V, dtype=np.float32)
    for mask, left in ((only(4), [4]), (only(4, 5), [4, 5]), (only(0, 4), [0])):
        scores = np.array(scores_of(logits, params, PROMPT, 1, mask))
        assert np.flatnonzero(np.isfinite(scores)).tolist() == left
        assert scores[left].tolist() == left


def conflicting(prefix):
    """Behind token 3 nothing may follow; it is drafted more often than it is kept."""
    return only() if prefix and prefix[-1] == 3 else FEW(prefix)


def extended(row_of, token):
    """[V + 1] float64 with an outcome more, V; where nothing may follow, all mass is on ``token``."""

    def row(prefix):
        if V in prefix or not conflicting(prefix).any():
            return point_mass(token, V + 1)
        return np.array([*legal(row_of, conflicting)(prefix), 0.0])

    return row


@pytest.mark.parametrize("verifies_block", [False, True])
def test_a_conflict_has_the_chance_of_plain_decoding(verifies_block):
    """A block looks at rows behind tokens it then rejects; a conflict there ends nothing."""

    def run(noise):
        row, verdict = test_cpu_sampler.one_round(
            DRAFT, TARGET, 2, noise=noise, mask_of=conflicting, verifies_block=verifies_block
        )
        assert verdict.has_conflict == (verdict.next_token is None)
        return None if verdict.has_conflict else run_of(row, verdict)

    emitted = emitted_probs_block if verifies_block else emitted_probs
    expected = {}
    for tokens, mass in emitted(extended(DRAFT, 0), extended(TARGET, V), 2).items():
        outcome = None if V in tokens else tokens
        expected[outcome] = expected.get(outcome, 0.0) + mass
    assert expected[None] > 0.1
    assert distance(law_of(run), expected) < MAX_ERROR


def judged_at_conflict(kind, target):
    """Verdict where the mask of the position reached leaves nothing."""
    sampler = sampler_for(V)
    draft = (2,) if kind != "plain" else ()
    masks = np.stack([only(2)] * len(draft) + [only()])
    row = row_for(draft, masks=masks)
    if kind == "greedy":
        row = replace(row, params=GREEDY)
    if kind in ("ratio", "block"):
        sampler.propose(logits_of(np.ones(V)), [replace(row, draft_tokens=())], vocab_size=V)
        row = replace(row, is_sampled_draft=True, verifies_block=kind == "block")
    if kind in ("tree", "candidates"):
        row = replace(row, parents=(0,))
    if kind == "candidates":
        point = CandidateNode(row=replace(row, draft_tokens=()), column=0, node=0, count=1)
        sampler.propose_children(logits_of(np.ones(V)), [point], vocab_size=V)
        row = replace(row, candidates=((1,), ()), is_sampled_draft=True)
    logits = np.concatenate([np.zeros((1, len(draft), V), np.float32), target], axis=1)
    return judge(sampler, logits, [row])[0]


KINDS = ["plain", "match", "greedy", "ratio", "block", "tree", "candidates"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conflict_is_told_from_logits_that_are_not_finite(kind):
    for value, has_conflict in ((0.0, True), (np.nan, False), (-np.inf, False), (np.inf, False)):
        verdict = judged_at_conflict(kind, np.full((1, 1, V), value, dtype=np.float32))
        assert (verdict.num_accepted, verdict.next_token) == (0, None)
        assert (verdict.path, verdict.has_conflict) == ((), has_conflict)


def test_a_draft_row_that_leaves_nothing_proposes_token_0():
    sampler = sampler_for(V)
    for params, mode in product((SamplingParams(), GREEDY), (MAX_ACCEPT, SEED_STABLE)):
        row = row_for(masks=only()[None], params=params, mode=mode)
        assert sampler.propose(logits_of(np.ones(V)), [row], vocab_size=V) == [0]


# --- beside other rows, and on devices


def test_a_masked_row_changes_no_neighbour():
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(3, 3, V)).astype(np.float32)
    rows = [row_for((1, 2), index=i, slot=i, seed=i, params=GREEDY) for i in range(3)]
    sampler = CpuSampler(max_batch=4, max_gamma=4, vocab_size=V)
    alone = [sampler.judge(logits, [row])[0] for row in rows]
    masked = replace(rows[1], masks=np.stack([only(3)] * 3))
    together = sampler.judge(logits, [rows[0], masked, rows[2]])
    assert [together[0], together[2]] == [alone[0], alone[2]]
    assert (together[1].num_accepted, together[1].next_token) == (0, 3)
