"""The CPU sampler held to the oracle: its exact law by walking its noise, and its answers in worked examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.sampling.base import MAX_BEHIND, ExactnessMode, SamplingParams
from outrider.engines.sampling.compiled_rows import GreedyRows
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.engines.sampling.draws import race_winner
from outrider.engines.sampling.noise import CounterNoise, Purpose
from outrider.engines.sampling.token_probs import TokenProbs, residual_probs, shared_weights
from outrider.runtime.oracle.verification import emitted_probs, point_mass

from tests.engines.rows import masks_at, row_for
from tests.engines.sampling.chosen_noise import ChosenNoise, FixedNoise, law_of
from tests.runtime.oracle.laws import (
    F1_DRAFT,
    F1_TARGET,
    F4A_RUNS,
    distance,
    f4a_draft,
    f4a_target,
    random_row_of,
)

MAX_ERROR = 1e-6
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode


def logits_of(*rows):
    """[1, R, V] float32 logits of probability rows."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows)).astype(np.float32)[None]


def sampler_for(vocab_size, noise=None, max_gamma=4):
    return CpuSampler(max_batch=4, max_gamma=max_gamma, vocab_size=vocab_size, noise=noise)


def judged(draft, rows, noise, **changes):
    """Verdict on a draft that was not sampled, or was sampled as the caller says."""
    sampler = sampler_for(len(rows[0]), noise)
    return sampler.judge(logits_of(*rows), [row_for(draft, **changes)])[0]


def run_of(row, verdict):
    return (*row.draft_tokens[: verdict.num_accepted], verdict.next_token)


def one_round(
    draft_row, target_row, gamma, *, noise=None, logits=logits_of, mask_of=None, **changes
):
    """Draft gamma tokens with the sampler, judge them, and return row and verdict."""
    sampler = sampler_for(len(target_row(())), noise)
    vocab_size = len(target_row(()))
    drafted: tuple[int, ...] = ()
    for _ in range(gamma):
        row = row_for(drafted, masks=masks_to(drafted, mask_of), **changes)
        (token,) = sampler.propose(logits(draft_row(drafted)), [row], vocab_size=vocab_size)
        drafted = (*drafted, token)
        if hasattr(noise, "trail"):
            noise.trail.append(token)
    target = logits(*[target_row(drafted[:index]) for index in range(gamma + 1)])
    changes["masks"] = masks_to(drafted, mask_of)
    row = row_for(drafted, is_sampled_draft=gamma > 0, **changes)
    return row, sampler.judge(target, [row])[0]


def masks_to(drafted, mask_of):
    return masks_at(mask_of, [drafted[:index] for index in range(len(drafted) + 1)])


def round_law(draft_row, target_row, gamma, **changes):
    """Exact law of the emitted run over the sampler's noise."""
    return law_of(
        lambda noise: run_of(*one_round(draft_row, target_row, gamma, noise=noise, **changes))
    )


def judged_law(draft, rows, **changes):
    """Exact law of the emitted run of a given point-mass draft."""

    def run(noise):
        return run_of(row_for(draft), judged(draft, rows, noise, **changes))

    return law_of(run)


def f1_draft(_):
    return F1_DRAFT


def f1_target(_):
    return F1_TARGET


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_sampled_round_has_the_oracles_law(seed):  # T1
    draft, target = random_row_of(seed, 3), random_row_of(seed + 50, 3)
    assert distance(round_law(draft, target, 1), emitted_probs(draft, target, 1)) < MAX_ERROR


def test_the_four_token_pair_has_the_oracles_law():  # T1
    assert (
        distance(round_law(f1_draft, f1_target, 1), emitted_probs(f1_draft, f1_target, 1))
        < MAX_ERROR
    )


def test_the_run_law_of_the_markov_pair():  # T6b
    assert distance(round_law(f4a_draft, f4a_target, 2), F4A_RUNS) < MAX_ERROR


def test_plain_decoding_has_the_targets_law():
    probs = round_law(f1_draft, f1_target, 0)
    assert distance(probs, {(t,): p for t, p in enumerate(F1_TARGET)}) < MAX_ERROR


def test_a_temperature_applies_to_draft_and_target_alike():
    params = SamplingParams(temperature=0.5)

    def squared(row_of):
        return lambda prefix: row_of(prefix) ** 2 / (row_of(prefix) ** 2).sum()

    expected = emitted_probs(squared(f1_draft), squared(f1_target), 1)
    assert distance(round_law(f1_draft, f1_target, 1, params=params), expected) < MAX_ERROR


def test_a_truncated_round_has_the_truncated_targets_law():  # T24
    def kept(row_of):
        return lambda prefix: (
            (row := np.where(row_of(prefix) >= 0.25, row_of(prefix), 0)) / sum(row)
        )

    expected = emitted_probs(kept(f1_draft), kept(f1_target), 1)
    actual = round_law(f1_draft, f1_target, 1, params=SamplingParams(top_k=2))
    assert distance(actual, expected) < MAX_ERROR


@pytest.mark.parametrize("lenience", [1.0, 0.8, 0.5])  # T13
def test_the_lenient_round_has_the_oracles_law(lenience):
    actual = round_law(f1_draft, f1_target, 1, mode=LENIENT, lenience=lenience)
    expected = emitted_probs(f1_draft, f1_target, 1, lenience=lenience)
    assert distance(actual, expected) < MAX_ERROR


def test_a_point_mass_draft_is_matched():  # T18
    actual = judged_law((1,), [F1_TARGET, F1_TARGET])
    expected = emitted_probs(lambda _: point_mass(1, 4), f1_target, 1)
    assert distance(actual, expected) < MAX_ERROR


@pytest.mark.parametrize("token", range(4))
def test_a_lenient_point_mass_has_the_oracles_law(token):
    actual = judged_law((token,), [F1_TARGET, F1_TARGET], mode=LENIENT, lenience=0.5)
    expected = emitted_probs(lambda _: point_mass(token, 4), f1_target, 1, lenience=0.5)
    assert distance(actual, expected) < MAX_ERROR


def test_match_mode_with_equal_models_keeps_the_argmax_with_its_own_probability():  # T38
    probs = judged_law((0,), [F1_TARGET, F1_TARGET])
    assert sum(m for run, m in probs.items() if len(run) == 2) == pytest.approx(0.4, abs=MAX_ERROR)


def test_drawing_again_after_a_mismatch_does_not_happen():  # T22
    probs = judged_law((0,), [[0.6, 0.4], [1.0, 0.0]])
    assert sum(m for run, m in probs.items() if run[0] == 0) == pytest.approx(0.6, abs=MAX_ERROR)


class ScriptedCoins(ChosenNoise):
    """Coins by purpose; DRAFT always proposes the token given."""

    def __init__(self, coins):
        super().__init__()
        self.coins = coins

    def uniform(self, seed, *, purpose, position, round_start):
        self.addresses.append((purpose, position, round_start))
        return self.coins[purpose]


# Dyadic rows: logits round, but probabilities of .5 and .25 come out of the softmax exactly.
HALVES = np.array([0.5, 0.5])
COIN_EDGE_DRAFT = np.array([1.0, 0.0])


def coin_edge(coin):
    noise = ScriptedCoins({Purpose.DRAFT: 0.0, Purpose.ACCEPT: coin, Purpose.RECOVER: 0.0})
    noise.coins[Purpose.BONUS] = 0.0
    _, verdict = one_round(lambda _: COIN_EDGE_DRAFT, lambda _: HALVES, 1, noise=noise)
    return verdict.num_accepted


def test_the_coin_at_the_ratio_itself_rejects():  # T3
    assert coin_edge(np.nextafter(0.5, 0.0)) == 1
    assert coin_edge(0.5) == 0


def test_a_coin_of_zero_does_not_keep_an_impossible_token():  # T4
    noise = ScriptedCoins({Purpose.DRAFT: 0.0, Purpose.ACCEPT: 0.0, Purpose.RECOVER: 0.0})
    _, verdict = one_round(
        lambda _: COIN_EDGE_DRAFT, lambda _: np.array([0.0, 1.0]), 1, noise=noise
    )
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_a_fully_accepted_draft_is_followed_by_the_bonus_row():  # T5
    rows = [HALVES, HALVES, np.array([0.0, 1.0])]
    row, verdict = one_round(lambda _: HALVES, lambda prefix: rows[len(prefix)], 2)
    assert (verdict.num_accepted, verdict.next_token) == (2, 1)
    assert verdict.overlaps == pytest.approx((1.0, 1.0))
    assert len(row.draft_tokens) == 2


def test_a_rejection_at_the_first_token_looks_at_no_later_row():  # T6
    nan = np.full(4, np.nan)
    noise = ScriptedCoins({Purpose.DRAFT: 0.5, Purpose.ACCEPT: 0.7, Purpose.RECOVER: 0.7})
    rows = [F1_TARGET, nan, nan, nan, nan]
    _, verdict = one_round(f1_draft, lambda prefix: rows[len(prefix)], 4, noise=noise)
    assert (verdict.num_accepted, verdict.next_token) == (0, 3)
    assert verdict.overlaps == pytest.approx((0.8,))


def test_every_draw_has_its_own_purpose_and_round():
    noise = ScriptedCoins({Purpose.DRAFT: 0.5, Purpose.ACCEPT: 0.7, Purpose.RECOVER: 0.7})
    one_round(f1_draft, f1_target, 2, noise=noise, history=np.array([0, 0, 0]))
    assert noise.addresses == [
        (Purpose.DRAFT, 3, 3),
        (Purpose.DRAFT, 4, 3),
        (Purpose.ACCEPT, 3, 3),
        (Purpose.RECOVER, 3, 3),
    ]


def test_matched_draws_are_keyed_by_position_alone():
    noise = ScriptedCoins({Purpose.MATCH: 0.1})
    judged((0, 0), [F1_TARGET] * 3, noise)
    assert noise.addresses == [(Purpose.MATCH, position, None) for position in (1, 2, 3)]


def test_a_draw_never_yields_a_token_without_mass():
    largest = 1.0 - 2.0**-53
    for probs in ([0.0, 1.0, 0.0], [0.3, 0.7, 0.0, 0.0], [1e-30, 0.0]):
        row = np.array(probs, dtype=np.float32)
        for uniform in (0.0, 0.5, largest, 1.0):
            assert row[TokenProbs(row).draw(uniform)] > 0.0


@pytest.mark.parametrize("size", [3, 64, 500, 704, 4096])
def test_every_token_owns_an_interval_as_long_as_its_probability(size):
    generator = np.random.default_rng(2)
    weights = generator.exponential(size=size).astype(np.float32) ** 3
    weights[generator.random(size) < 0.4] = 0.0
    num_points = 20_000
    points = (np.arange(num_points) + 0.5) / num_points
    drawn = [TokenProbs(weights).draw(float(point)) for point in points]
    shares = np.bincount(drawn, minlength=size) / num_points
    probs = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert abs(shares - probs).max() < 1.0 / num_points + MAX_ERROR
    assert not shares[weights == 0.0].any()


def test_a_residual_of_rounding_falls_back_to_the_target_and_is_counted():
    target = TokenProbs(np.array([0.5, 0.5], dtype=np.float32))
    draft = TokenProbs(np.array([0.5, 0.5 - 1e-7], dtype=np.float32))
    shared, _ = shared_weights(target, draft, np.zeros(2, dtype=np.float32))
    residual, is_fallback = residual_probs(target, shared)
    assert is_fallback
    assert residual is target


def test_a_certain_token_that_the_coin_cannot_lose_is_kept_when_lenient():
    # p(x) = 1: kept for every coin, so the empty residual of p without x is never drawn from.
    probs = judged_law((0,), [[1.0, 0.0], [1.0, 0.0]], mode=LENIENT, lenience=0.5)
    assert probs == pytest.approx({(0, 0): 1.0})


GREEDY = SamplingParams(temperature=0.0)
# The same law, kept from the fast path by a bias of nothing.
SLOW_GREEDY = SamplingParams(temperature=0.0, logit_bias=((0, 0.0),))
greedy_paths = pytest.mark.parametrize("params", [GREEDY, SLOW_GREEDY], ids=["fast", "slow"])


@greedy_paths
@pytest.mark.parametrize("mode", list(ExactnessMode))
def test_greedy_keeps_what_equals_the_argmax(params, mode):
    rows = [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]
    for draft, expected in [((1, 0), (2, 1)), ((1, 1), (1, 0)), ((0, 0), (0, 1)), ((), (0, 1))]:
        verdict = judged(draft, rows[: len(draft) + 1], None, params=params, mode=mode)
        assert (verdict.num_accepted, verdict.next_token) == expected


@greedy_paths
def test_greedy_keeps_the_lowest_id_of_a_tie_only(params):  # T9
    assert judged((0,), [[0.4, 0.4, 0.2]] * 2, None, params=params).num_accepted == 1
    assert judged((1,), [[0.4, 0.4, 0.2]] * 2, None, params=params).num_accepted == 0
    tie = judged((1,), [[0.4, 0.4, 0.2]] * 2, None, params=params, mode=LENIENT, lenience=1.0)
    assert tie.num_accepted == 0


@pytest.mark.parametrize(("token", "expected"), [(0, 1), (1, 0), (2, 0), (3, 1)])  # T14
def test_lenient_greedy_keeps_tokens_near_the_greatest(token, expected):
    verdict = judged((token,), [F1_TARGET] * 2, None, params=GREEDY, mode=LENIENT, lenience=0.7)
    assert verdict.num_accepted == expected
    assert verdict.next_token == 0


@greedy_paths
def test_a_greedy_proposal_is_the_argmax_within_the_targets_vocabulary(params):
    logits = logits_of([0.1, 0.2, 0.7])
    assert sampler_for(3).propose(logits, [row_for(params=params)], vocab_size=3) == [2]
    assert sampler_for(2).propose(logits, [row_for(params=params)], vocab_size=2) == [1]


def greedy_tokens(draft_source, gamma, num_tokens, params, logits_row):
    """Greedy speculative decoding of a constant model, the draft taken from ``draft_source``."""
    sampler = sampler_for(len(logits_row))
    history: list[int] = []
    while len(history) < num_tokens:
        draft = tuple(draft_source(len(history) + i) for i in range(gamma))
        logits = np.tile(np.array(logits_row, dtype=np.float32), (1, gamma + 1, 1))
        row = row_for(draft, params=params, history=np.array(history, dtype=np.int64), num_prompt=0)
        (verdict,) = sampler.judge(logits, [row])
        history.extend(run_of(row, verdict))
    return history[:num_tokens]


@pytest.mark.parametrize("gamma", [0, 1, 2, 4])
@pytest.mark.parametrize("draft_source", [lambda _: 0, lambda _: 1, lambda p: p % 2])
def test_penalties_see_the_tokens_drafted_before(gamma, draft_source):  # T26
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    tokens = greedy_tokens(draft_source, gamma, 6, params, [2.0, 1.5])
    assert tokens == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_min_tokens_counts_the_tokens_drafted_before(gamma):
    params = SamplingParams(temperature=0.0, min_tokens=2, end_token_ids=(0,))
    assert greedy_tokens(lambda _: 1, gamma, 3, params, [2.0, 1.5]) == [1, 1, 0]


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_a_bad_word_may_span_history_and_draft(gamma):
    params = SamplingParams(temperature=0.0, bad_words=((0, 0),))
    assert greedy_tokens(lambda _: 0, gamma, 4, params, [2.0, 1.5]) == [0, 1, 0, 1]


def test_rejected_draft_tokens_leave_nothing_behind():  # T32
    params = SamplingParams(temperature=0.0, frequency_penalty=0.2)
    plain = greedy_tokens(lambda _: 0, 0, 12, params, [2.0, 1.5, 1.1])
    for gamma in (1, 2, 4):
        assert greedy_tokens(lambda p: p % 3, gamma, 12, params, [2.0, 1.5, 1.1]) == plain


def test_the_shared_race_emits_the_targets_winner():  # T17
    noise = FixedNoise(exponentials=[0.3, 0.2, 0.9, 0.3])
    row, verdict = one_round(f1_draft, f1_target, 1, noise=noise, mode=SEED_STABLE)
    assert (row.draft_tokens, verdict.num_accepted, verdict.next_token) == ((1,), 0, 0)
    noise = FixedNoise(exponentials=[0.5, 0.1, 0.9, 0.2])
    row, verdict = one_round(f1_draft, f1_target, 1, noise=noise, mode=SEED_STABLE)
    assert (row.draft_tokens, verdict.num_accepted, verdict.next_token) == ((1,), 1, 1)


def decoded(gamma, mode, seed, *, is_model_draft, num_tokens=12):
    """Tokens of a sampled completion of a Markov model, with or without a draft."""
    draft_row, target_row = random_row_of(3, 4), random_row_of(4, 4)
    sampler = sampler_for(4)
    history = [0]
    while len(history) <= num_tokens:
        past = tuple(history[-1:])
        base = row_for(mode=mode, seed=seed, history=np.array(history))
        drafted: tuple[int, ...] = ()
        for _ in range(gamma):
            context = (*past, *drafted)[-1:]
            row = replace(base, draft_tokens=drafted)
            logits = logits_of(draft_row(context))
            token = (
                sampler.propose(logits, [row], vocab_size=4)[0] if is_model_draft else context[0]
            )
            drafted = (*drafted, token)
        rows = [target_row((*past, *drafted[:i])[-1:]) for i in range(gamma + 1)]
        row = replace(base, draft_tokens=drafted)
        history.extend(run_of(row, sampler.judge(logits_of(*rows), [row])[0]))
    return history[1 : num_tokens + 1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("is_model_draft", [True, False])
def test_seed_stable_tokens_are_those_of_plain_decoding(seed, gamma, is_model_draft):  # T29
    plain = decoded(0, SEED_STABLE, seed, is_model_draft=False)
    assert decoded(gamma, SEED_STABLE, seed, is_model_draft=is_model_draft) == plain


@pytest.mark.parametrize("seed", range(8))
def test_matched_point_masses_give_the_tokens_of_plain_decoding(seed):  # T29
    plain = decoded(0, MAX_ACCEPT, seed, is_model_draft=False)
    assert decoded(3, MAX_ACCEPT, seed, is_model_draft=False) == plain


def test_the_race_draws_from_the_row():
    noise = CounterNoise()
    row = F1_TARGET.astype(np.float32)
    num_draws = 4000
    wins = [race_winner(row, noise.exponentials(1, p, 4)) for p in range(num_draws)]
    counts = np.bincount(wins, minlength=4)
    expected = F1_TARGET * num_draws
    # Chi-square with 3 degrees of freedom exceeds 16.27 with probability .001; the noise is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3, top_p=0.8), GREEDY])
def test_a_draft_that_is_the_target_is_always_kept(mode, params):  # T37
    row_of = random_row_of(9, 6)
    for seed in range(20):
        _, verdict = one_round(row_of, row_of, 4, mode=mode, params=params, seed=seed)
        assert verdict.num_accepted == 4
        assert verdict.num_fallbacks == 0


@pytest.mark.parametrize("is_sampled", [True, False])
def test_lenience_of_one_is_bit_identical_to_max_accept(is_sampled):  # T13
    for seed in range(40):
        verdicts = []
        for mode in (MAX_ACCEPT, LENIENT):
            if is_sampled:
                verdicts.append(one_round(f1_draft, f1_target, 3, mode=mode, seed=seed))
            else:
                verdict = judged((1, 0), [F1_TARGET] * 3, None, mode=mode, seed=seed)
                verdicts.append((None, verdict))
        assert verdicts[0][1] == verdicts[1][1]


def test_a_larger_draft_vocabulary_is_cut_to_the_targets():  # T35
    def wide(_):
        return np.array([0.1, 0.2, 0.7])

    sampler = sampler_for(2)
    for seed in range(50):
        (token,) = sampler.propose(logits_of(wide(())), [row_for(seed=seed)], vocab_size=2)
        assert token in (0, 1)


def test_a_smaller_draft_vocabulary_keeps_the_targets_law():  # T35
    draft, target = np.array([0.5, 0.5]), np.array([0.2, 0.3, 0.5])

    def run(noise):
        sampler = sampler_for(3, noise)
        (token,) = sampler.propose(logits_of(draft), [row_for()], vocab_size=3)
        noise.trail.append(token)
        row = row_for((token,), is_sampled_draft=True)
        return run_of(row, sampler.judge(logits_of(target, target), [row])[0])[0]

    assert distance(law_of(run), dict(enumerate(target))) < MAX_ERROR


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("params", [SamplingParams(), GREEDY, SLOW_GREEDY])
def test_a_draft_token_outside_the_vocabulary_is_rejected(mode, params):  # T35
    verdict = judged((4,), [F1_TARGET] * 2, None, mode=mode, params=params, lenience=0.5)
    assert verdict.num_accepted == 0
    assert verdict.next_token in range(4)


BROKEN = [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=1), GREEDY, SLOW_GREEDY])
@pytest.mark.parametrize("mode", list(ExactnessMode))
def test_a_broken_row_ends_its_own_request_only(broken, params, mode):  # T36
    logits = np.array([[[0.0, 50.0]], [broken], [[50.0, 0.0]]], dtype=np.float32)
    rows = [row_for(index=i, slot=i, params=params, mode=mode, lenience=0.5) for i in range(3)]
    verdicts = sampler_for(2).judge(logits, [replace(r, num_logprobs=1) for r in rows])
    assert [v.next_token for v in verdicts] == [1, None, 0]
    assert [len(v.logprobs) for v in verdicts] == [1, 0, 1]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("is_bonus", [True, False])
def test_a_broken_row_inside_a_sampled_draft_emits_nothing(broken, is_bonus):  # T36
    def identity(*rows):
        return np.array(rows, dtype=np.float32)[None]

    good = np.zeros(2)
    rows = [good, broken] if is_bonus else [broken, good]
    _, verdict = one_round(lambda _: good, lambda p: rows[len(p)], 1, logits=identity)
    assert (verdict.num_accepted, verdict.next_token) == (0, None)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("mode", list(ExactnessMode))
def test_a_broken_draft_row_still_yields_an_exact_round(broken, mode):
    sampler = sampler_for(2)
    logits = np.array([[broken]], dtype=np.float32)
    assert sampler.propose(logits, [row_for(mode=mode)], vocab_size=2) == [0]
    row = row_for((0,), mode=mode, is_sampled_draft=mode is not SEED_STABLE)
    verdict = sampler.judge(logits_of([0.0, 1.0], HALVES), [row])[0]
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


NEIGHBOURS = (
    (SamplingParams(), MAX_ACCEPT),
    (SamplingParams(temperature=0.7), MAX_ACCEPT),
    (SamplingParams(top_p=0.7), SEED_STABLE),
    (SamplingParams(top_k=5, top_p=0.9), MAX_ACCEPT),
    (SamplingParams(top_p=0.95), MAX_ACCEPT),
    (SamplingParams(min_p=0.02), LENIENT),
    (SamplingParams(frequency_penalty=0.3), MAX_ACCEPT),
    (GREEDY, MAX_ACCEPT),
)


def drafted_and_judged(sampler, draft, target, rows):
    """Drafts of two tokens and their verdicts, which hold every sum over a row as an overlap."""
    vocab_size = target.shape[-1]
    for index in range(2):
        tokens = sampler.propose(draft[:, index : index + 1], rows, vocab_size=vocab_size)
        rows = [
            replace(row, draft_tokens=(*row.draft_tokens, token))
            for row, token in zip(rows, tokens, strict=True)
        ]
    rows = [
        replace(row, is_sampled_draft=not row.params.is_greedy and row.mode is not SEED_STABLE)
        for row in rows
    ]
    return [(r.draft_tokens, v) for r, v in zip(rows, sampler.judge(target, rows), strict=True)]


@pytest.mark.parametrize("vocab_size", [8, 700, 1500, 9000])
def test_neighbours_and_row_order_change_no_bit(vocab_size):
    generator = np.random.default_rng(5)
    num_rows = len(NEIGHBOURS)
    draft = generator.normal(size=(num_rows, 2, vocab_size)).astype(np.float32)
    target = generator.normal(size=(num_rows, 3, vocab_size)).astype(np.float32)
    target[:, :2] = 0.5 * target[:, :2] + draft
    rows = [
        row_for(index=i, slot=i, params=probs, seed=i, mode=mode, lenience=0.9)
        for i, (probs, mode) in enumerate(NEIGHBOURS)
    ]

    def sampler():
        return CpuSampler(max_batch=num_rows, max_gamma=2, vocab_size=vocab_size)

    together = drafted_and_judged(sampler(), draft, target, rows)
    backwards = drafted_and_judged(sampler(), draft, target, rows[::-1])[::-1]
    for i, row in enumerate(rows):
        lone = replace(row, index=0, slot=0)
        alone = drafted_and_judged(sampler(), draft[i : i + 1], target[i : i + 1], [lone])
        assert together[i] == backwards[i] == alone[0]
    assert any(verdict.overlaps for _, verdict in together)


def test_logprobs_are_those_of_the_raw_target_rows():
    params = SamplingParams(temperature=0.5, top_k=1)
    row, verdict = one_round(f1_draft, f1_target, 1, params=params, num_logprobs=2)
    emitted = run_of(row, verdict)
    assert len(verdict.logprobs) == len(emitted)
    for token, logprobs in zip(emitted, verdict.logprobs, strict=True):
        assert logprobs.logprob == pytest.approx(np.log(F1_TARGET[token]), abs=MAX_ERROR)
        assert [t for t, _ in logprobs.top] == [0, 3]
        assert logprobs.top[0][1] == pytest.approx(np.log(0.4), abs=MAX_ERROR)


def test_logprobs_are_computed_only_when_asked_for():
    assert judged((), [F1_TARGET], None).logprobs == ()
    assert judged((), [F1_TARGET], None, num_logprobs=0).logprobs[0].top == ()


@pytest.mark.parametrize(("index", "num_drafted"), [(2, 0), (0, 3)])
def test_greedy_logits_that_are_not_there_are_refused_and_not_read(
    index: int, num_drafted: int
) -> None:
    rows = GreedyRows(max_batch=4, max_gamma=4)
    logits = np.zeros((2, 3, 8), dtype=np.float32)
    row = replace(row_for((0,) * num_drafted), index=index)
    with pytest.raises(IndexError):
        rows.judge(logits, [row])
    if not num_drafted:
        with pytest.raises(IndexError):
            rows.propose(logits, [row], vocab_size=8)


def test_a_greedy_draft_longer_than_any_is_refused_and_not_taken_for_its_neighbours() -> None:
    rows = GreedyRows(max_batch=2, max_gamma=2)
    logits = np.zeros((2, 6, 8), dtype=np.float32)
    drafted = [replace(row_for((0,) * count), index=index) for index, count in enumerate((3, 1))]
    with pytest.raises(IndexError):
        rows.judge(logits, drafted)


@pytest.mark.parametrize(
    "changes",
    [
        {"params": SamplingParams(temperature=0.0)},
        {"params": SamplingParams(temperature=1.0)},
        {"params": SamplingParams(temperature=1.0), "mode": SEED_STABLE},
        {"params": SamplingParams(temperature=1.0, top_k=3)},
    ],
)
def test_point_masses_behind_gamma_are_judged_as_plain_decoding_draws(changes):
    max_gamma, vocab_size = 2, 5
    length = max_gamma + MAX_BEHIND
    sampler = sampler_for(vocab_size, max_gamma=max_gamma)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, length + 1, vocab_size)).astype(np.float32)
    tokens: list[int] = []
    for at in range(length + 1):
        row = row_for(history=np.array([1, *tokens]), **changes)
        tokens.append(sampler.judge(logits[:, at:], [row])[0].next_token)
    history = np.array([1])
    row = row_for(tuple(tokens[:-1]), history=history, **changes)
    whole = sampler.judge(logits, [row])[0]
    assert (whole.num_accepted, whole.next_token) == (length, tokens[-1])
    wrong = (*tokens[: length - 1], (tokens[length - 1] + 1) % vocab_size)
    cut = sampler.judge(logits, [row_for(wrong, history=history, **changes)])[0]
    assert (cut.num_accepted, cut.next_token) == (length - 1, tokens[length - 1])
