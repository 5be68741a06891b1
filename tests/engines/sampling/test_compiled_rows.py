"""Rows that are proposed and judged in one compiled call have the very answers of the sampler's steps one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.sampling import adjust, compiled_rows, token_probs
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.noise import CounterNoise

from tests.engines.rows import row_for
from tests.engines.sampling.test_kernels import interpreted

MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GAMMA = 4
LAWS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "nearly greedy": SamplingParams(temperature=1e-40),
    "top-p": SamplingParams(temperature=1.3, top_p=0.9),
    "min-p": SamplingParams(min_p=0.1),
    "top-p and min-p": SamplingParams(top_p=0.95, min_p=0.02),
}
laws = pytest.mark.parametrize("params", LAWS.values(), ids=LAWS)


def samplers(vocab_size):
    """Compiled calls, and one step after another."""
    return [
        CpuSampler(max_batch=3, max_gamma=GAMMA, vocab_size=vocab_size, noise=noise)
        for noise in (None, CounterNoise())
    ]


def logits_for(seed, vocab_size, *, num_rows=1, scale=2.0):
    """Target logits [num_rows, GAMMA + 1, V] and draft logits near them [GAMMA, num_rows, 1, V], float32."""
    generator = np.random.default_rng(seed)
    target = generator.standard_normal((num_rows, GAMMA + 1, vocab_size)) * scale
    draft = target[:, :GAMMA] + generator.standard_normal((num_rows, GAMMA, vocab_size))
    return target.astype(np.float32), draft.astype(np.float32).swapaxes(0, 1)[:, :, None]


def rounds(sampler, target, draft, rows, *, is_sampled=True, vocab_size=None):
    """Drafts of all rows, and their verdicts."""
    drafted = [[] for _ in rows]
    for logits in draft:
        asked = [
            replace(row, draft_tokens=tokens) for row, tokens in zip(rows, drafted, strict=True)
        ]
        drawn = sampler.propose(logits, asked, vocab_size=vocab_size or target.shape[-1])
        for tokens, token in zip(drafted, drawn, strict=True):
            tokens.append(token)
    asked = [
        replace(row, draft_tokens=tuple(tokens), is_sampled_draft=is_sampled)
        for row, tokens in zip(rows, drafted, strict=True)
    ]
    return drafted, sampler.judge(target, asked)


def both(seed, vocab_size, *, draft_size=None, **changes):
    """Drafts and verdicts of one row, compiled and step by step."""
    target, draft = logits_for(seed, vocab_size)
    is_sampled = changes.pop("is_sampled", True)
    row = row_for(seed=2**64 - 1 - seed, history=np.arange(seed % 40), **changes)
    return [
        rounds(sampler, target, draft[..., :draft_size], [row], is_sampled=is_sampled)
        for sampler in samplers(vocab_size)
    ]


@laws
@pytest.mark.parametrize("vocab_size", [2, 63, 130, 4096])
def test_a_sampled_draft(params, vocab_size):
    seen = set()
    for seed in range(30):
        compiled, stepwise = both(seed, vocab_size, params=params)
        assert compiled == stepwise
        seen.add(compiled[1][0].num_accepted)
    assert len(seen) > 2  # rejected at several places


@laws
@pytest.mark.parametrize("draft_size", [1, 50, 129])
def test_a_draft_model_of_a_smaller_vocabulary(params, draft_size):
    for seed in range(20):
        compiled, stepwise = both(seed, 130, params=params, draft_size=draft_size)
        assert compiled == stepwise
        assert max(compiled[0][0]) < draft_size


@laws
def test_a_lenient_judgement(params):
    verdicts = []
    for seed in range(20):
        compiled, stepwise = both(seed, 130, params=params, mode=LENIENT, lenience=0.5)
        assert compiled == stepwise
        verdicts.append(compiled != both(seed, 130, params=params)[0])
    assert any(verdicts) or params.temperature < 1e-30


@laws
@pytest.mark.parametrize("changes", [{"is_sampled": False}, {"verifies_block": True}])
def test_other_judgements_of_what_was_drafted(params, changes):
    for seed in range(20):
        compiled, stepwise = both(seed, 130, params=params, **changes)
        assert compiled == stepwise


@laws
def test_plain_decoding(params):
    for seed in range(20):
        target, _ = logits_for(seed, 130)
        row = row_for(seed=seed, params=params)
        compiled, stepwise = (sampler.judge(target, [row]) for sampler in samplers(130))
        assert compiled == stepwise


def test_rows_have_the_same_answers_alone_and_together():
    target, draft = logits_for(5, 700, num_rows=3)
    rows = [
        row_for(index=index, slot=index, seed=index, params=params)
        for index, params in enumerate(list(LAWS.values())[:3])
    ]
    together = rounds(samplers(700)[0], target, draft, rows)
    for index, row in enumerate(rows):
        drafted, verdicts = rounds(samplers(700)[0], target, draft, [row])
        assert drafted[0] == together[0][index]
        assert verdicts[0] == together[1][index]


def test_a_law_kept_for_the_last_request_of_a_slot_is_forgotten():
    for sampler, other in zip(samplers(130), samplers(130), strict=True):
        for seed, probs in enumerate(
            (SamplingParams(top_k=3), SamplingParams(), SamplingParams(top_k=5))
        ):
            target, draft = logits_for(seed, 130)
            rows = [row_for(seed=seed, params=probs)]
            assert rounds(sampler, target, draft, rows) == rounds(other, target, draft, rows)
            other = samplers(130)[0]


def test_a_wider_law_of_an_earlier_round_leaves_nothing_behind():
    target, draft = logits_for(1, 9)
    for sampler, fresh in zip(samplers(9), samplers(9), strict=True):
        rounds(sampler, target, draft, [row_for()])
        after = rounds(sampler, target, draft[..., :4], [row_for()])
        assert after == rounds(fresh, target, draft[..., :4], [row_for()])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", range(GAMMA + 1))
@pytest.mark.parametrize("is_sampled", [True, False])
def test_logits_that_are_not_finite(bad, at, is_sampled):
    for seed in range(6):
        target, draft = logits_for(seed, 130)
        target[0, at, 7] = bad
        draft[:at, 0, 0, 9] = bad
        compiled, stepwise = (
            rounds(sampler, target, draft, [row_for(seed=seed)], is_sampled=is_sampled)
            for sampler in samplers(130)
        )
        assert compiled == stepwise
        assert compiled[0][0][:at] == [0] * at


def test_tokens_outside_the_vocabulary_are_never_kept():
    target, draft = logits_for(3, 130)
    for token in (-1, 130, 2**40):
        for is_sampled in (True, False):
            verdicts = []
            for sampler in samplers(130):
                rounds(sampler, target, draft, [row_for()])
                row = row_for((token,), is_sampled_draft=is_sampled)
                verdicts.append(sampler.judge(target, [row])[0])
            assert verdicts[0] == verdicts[1]
            assert verdicts[0].num_accepted == 0


def test_a_residual_of_rounding_is_the_target_itself():
    """q is p but for rounding and a token that p all but lacks, which the coin rejects."""
    target = np.zeros((1, 2, 64), dtype=np.float32)
    target[0, :, 5] = -18.0
    draft = np.zeros((1, 1, 1, 64), dtype=np.float32)
    draft[0, 0, 0, 5] = -12.0
    found = 0
    for seed in range(40):
        verdicts = []
        for sampler in samplers(64):
            sampler.propose(draft[0], [row_for(seed=seed)], vocab_size=64)
            row = row_for((5,), seed=seed, is_sampled_draft=True)
            verdicts.append(sampler.judge(target, [row])[0])
        assert verdicts[0] == verdicts[1]
        found += verdicts[0].num_fallbacks
    assert found > 30


def check_against(module, monkeypatch):
    """Other kernels: their judgements in one call, held to the sampler's steps with them."""
    monkeypatch.setattr(compiled_rows, "row_kernels", module)
    for user, name in ((adjust, "kernels"), (adjust, "truncation"), (token_probs, "kernels")):
        monkeypatch.setattr(user, name, module)
    smaller = {"draft_size": 6}
    lenient = {"mode": LENIENT, "lenience": 0.5}
    with np.errstate(over="ignore"):  # unsigned words wrap
        for seed in range(24):
            for changes in ({}, smaller, lenient, {"is_sampled": False}):
                compiled, stepwise = both(seed, 9, params=LAWS["plain"], **changes)
                assert compiled == stepwise
        test_a_wider_law_of_an_earlier_round_leaves_nothing_behind()
        test_logits_that_are_not_finite(np.nan, 1, True)
        test_logits_that_are_not_finite(np.nan, GAMMA, True)
        test_logits_that_are_not_finite(np.nan, 1, False)
        test_tokens_outside_the_vocabulary_are_never_kept()
        test_a_residual_of_rounding_is_the_target_itself()


DRAW = "drafts[depth][logits.shape[0] :] = np.float32(0.0)\n"
MUTANTS = {
    "a draft by the coin's word": ("philox.DRAFT_WORD,", "philox.ACCEPT_WORD,"),
    "a draft by the round's first number": ("DRAFT_WORD, start + depth,", "DRAFT_WORD, start,"),
    "drafts the same in every round": ("start + depth, start + 1)", "start + depth, 0)"),
    "the last request's tail kept": (DRAW, "pass\n"),
    "the draft's sum forgotten": ("totals[depth] = mass", "totals[depth] = 1.0"),
    "a broken draft row without mass": ("weights[0] = ONE", "weights[0] = 0.0"),
    "the same coin for all": ("philox.ACCEPT_WORD, start + i,", "philox.ACCEPT_WORD, start,"),
    "the coin drawn from again": ("philox.RECOVER_WORD,", "philox.ACCEPT_WORD,"),
    "the bonus by the recovered word": ("philox.BONUS_WORD,", "philox.RECOVER_WORD,"),
    "coins the same in every round": ("ROUND_STREAM, start + 1\n", "ROUND_STREAM, 0\n"),
    "overlaps in the units of the row": ("shared_mass / mass\n", "shared_mass\n"),
    "shares of unnormalised laws": ("mass / draft_totals[i], scratch", "1.0, scratch"),
    "the target's weight for the draft's": ("float(drafts[i, token])", "float(weights[token])"),
    "a token of the end wrapped": ("if 0 <= token < weights.shape[0]:", "if token < 9:"),
    "lenience of the ratio test left out": (
        "            coin, lenience, target_weight,",
        "            coin, 1.0, target_weight,",
    ),
    "the fallback from the residual": ("draw(weights, uniform * mass), 1", "draw(scratch, 0.0), 1"),
    "the target for the residual": (
        "draw(scratch, uniform * left), 0",
        "draw(weights, uniform * mass), 0",
    ),
    "the bonus from the row before": (
        "write_dense(logits[gamma],",
        "write_dense(logits[gamma - 1],",
    ),
    "matches in the round's stream": ("philox.MATCH_STREAM,", "philox.ROUND_STREAM,"),
    "matches by one number": ("philox.MATCH_WORD, start + i,", "philox.MATCH_WORD, start,"),
    "a mismatch kept": ("return i, drawn", "return i + (i < gamma), drawn"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name, monkeypatch):
    old, new = MUTANTS[name]
    with pytest.raises((AssertionError, IndexError)):
        check_against(interpreted(old, new), monkeypatch)


def test_the_kernels_have_the_same_answers_uncompiled(monkeypatch):
    check_against(interpreted(), monkeypatch)
