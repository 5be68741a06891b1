"""The device sampler's kernels on the CPU: their laws against the oracle, their answers beside others.

Laws are enumerated. Answers are compared token for token, at fixed seeds, with a sequential sampler over the oracle's
float64 laws (``tests.engines.sampling.mixed_batches`` says why), those of batches of every kind in
``test_kernel_batches``. ``CpuSampler`` draws truncated and long rows in another order, so with it
greedy and ``seed_stable`` answers are compared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider.engines.accelerators.device.base import HostDevice
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.base import EngineError
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler

from tests.emulation.kernels.host import HostKernels
from tests.engines.accelerators.device.device_laws import MAX_GAMMA
from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import logits_of, same
from tests.engines.sampling.mixed_batches import drafted_by
from tests.engines.sampling.reference_sampler import ReferenceSampler
from tests.runtime.oracle.laws import F1_DRAFT, F1_TARGET

MAX_ERROR = 1e-6
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GREEDY = SamplingParams(temperature=0.0)


def test_races_of_the_greatest_seeds_are_won_by_the_same_tokens(loaded):
    """Seeds reach the kernels in limbs of 16 bits."""
    samplers = [loaded(8)[1], ReferenceSampler()]
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(2, 3, 8)).astype(np.float32)
    for seed in range(2**63, 2**63 + 20):
        rows = [
            row_for(index=i, slot=i, seed=seed, mode=mode, history=np.arange(seed % 7 + 1))
            for i, mode in enumerate([SEED_STABLE, MAX_ACCEPT])
        ]
        drafts = [drafted_by(sampler, rows, [logits, logits], 8) for sampler in samplers]
        assert drafts[0] == drafts[1]
        judged = [
            replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts[0], strict=True)
        ]
        verdicts = (sampler.judge(logits, judged) for sampler in samplers)
        assert all(map(same, *verdicts))


@pytest.mark.parametrize("seed", range(8))
def test_greedy_and_shared_noise_give_the_tokens_of_the_cpu_sampler(loaded, seed):
    generator = np.random.default_rng(seed)
    _, device = loaded(8)
    host = CpuSampler(max_batch=4, max_gamma=MAX_GAMMA, vocab_size=8)
    laws = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7, temperature=1.5),
    ]
    history = generator.integers(0, 8, 12)
    rows = [
        row_for(
            index=i,
            slot=i,
            params=params,
            mode=SEED_STABLE,
            seed=seed,
            history=history,
            num_logprobs=2,
            num_choices=3,
        )
        for i, params in enumerate(laws)
    ]
    draft_logits = generator.normal(scale=2, size=(2, 4, 2, 8)).astype(np.float32)
    drafts = drafted_by(device, rows, draft_logits, 8)
    assert drafts == drafted_by(host, rows, draft_logits, 8)
    judged = [replace(row, draft_tokens=draft) for row, draft in zip(rows, drafts, strict=True)]
    logits = draft_logits[:, :, 0].swapaxes(0, 1) + 0.5 * generator.normal(size=(4, 2, 8))
    logits = np.concatenate([logits, logits[:, :1]], axis=1).astype(np.float32)
    expected = host.judge(logits, judged)
    for verdict, wanted in zip(device.judge(logits, judged), expected, strict=True):
        assert same(verdict, wanted)
        assert verdict.choices == wanted.choices
        assert len(verdict.choices) == 3
        for found, known in zip(verdict.logprobs, wanted.logprobs, strict=True):
            assert found.logprob == pytest.approx(known.logprob, abs=1e-5)
            assert [token for token, _ in found.top] == [token for token, _ in known.top]
            assert [p for _, p in found.top] == pytest.approx([p for _, p in known.top], abs=1e-5)


def test_ragged_drafts_share_a_batch(loaded):
    _, device = loaded(8)
    reference = ReferenceSampler()
    logits = np.random.default_rng(3).normal(size=(4, 4, 8)).astype(np.float32)
    rows = [
        row_for(
            range(gamma), index=gamma, slot=gamma, seed=gamma, params=SamplingParams(temperature=t)
        )
        for gamma, t in enumerate([1.0, 0.0, 0.5, 2.0])
    ]
    for verdict, expected in zip(
        device.judge(logits, rows), reference.judge(logits, rows), strict=True
    ):
        assert same(verdict, expected)


def test_kept_laws_belong_to_the_slot(loaded):
    """Two slots draft from row 0, one after the other, before either is judged."""
    _, device = loaded(4)
    rows = [row_for(slot=slot, seed=slot) for slot in (2, 5)]
    judged = []
    for row, probs in zip(rows, (F1_DRAFT, F1_DRAFT[::-1]), strict=True):
        (token,) = device.propose(logits_of(probs)[None], [row], vocab_size=4)
        judged.append(replace(row, draft_tokens=(token,), is_sampled_draft=True))
    logits = logits_of(F1_TARGET, F1_TARGET)[None]
    overlaps = [device.judge(logits, [row])[0].overlaps for row in judged]
    assert overlaps[0] == pytest.approx((0.8,), abs=MAX_ERROR)
    assert overlaps[1] == pytest.approx((0.7,), abs=MAX_ERROR)


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3, top_p=0.8), GREEDY])
def test_a_draft_that_is_the_target_is_always_kept(loaded, mode, params):  # T37
    _, device = loaded(4)
    logits = np.random.default_rng(9).normal(size=(1, 5, 4)).astype(np.float32)
    for seed in range(8):
        row = row_for(params=params, mode=mode, seed=seed)
        (draft,) = drafted_by(device, [row], [logits[:, i : i + 1] for i in range(4)], 4)
        is_sampled = not params.is_greedy and mode is not SEED_STABLE
        row = replace(row, draft_tokens=draft, is_sampled_draft=is_sampled)
        (verdict,) = device.judge(logits, [row])
        assert (verdict.num_accepted, verdict.num_fallbacks) == (4, 0)


BROKEN = [[np.nan, 0.0, 0.0, 0.0], [np.inf, 0.0, 0.0, 0.0], [-np.inf] * 4]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=1), GREEDY])
@pytest.mark.parametrize("mode", list(ExactnessMode))
def test_a_broken_row_ends_its_own_request_only(loaded, broken, params, mode):  # T36
    _, device = loaded(4)
    sound = [0.0, 50.0, 0.0, 0.0]
    logits = np.array([[sound], [broken], [sound]], dtype=np.float32)
    rows = [row_for(index=i, slot=i, params=params, mode=mode, num_logprobs=1) for i in range(3)]
    verdicts = device.judge(logits, rows)
    assert [verdict.next_token for verdict in verdicts] == [1, None, 1]
    assert [len(verdict.logprobs) for verdict in verdicts] == [1, 0, 1]
    assert device.propose(logits, rows, vocab_size=4) == [1, 0, 1]


def test_a_broken_row_behind_a_rejection_is_not_looked_at(loaded):  # T6
    _, device = loaded(4)
    logits = np.array([[[50.0, 0.0, 0.0, 0.0], BROKEN[0]]], dtype=np.float32)
    (verdict,) = device.judge(logits, [row_for((1,))])
    assert (verdict.num_accepted, verdict.next_token) == (0, 0)
    (verdict,) = device.judge(logits, [row_for((0,))])
    assert (verdict.num_accepted, verdict.next_token) == (0, None)


@pytest.mark.parametrize("draft_vocab_size", [5, 11])
def test_a_draft_of_another_vocabulary_is_cut_or_filled(loaded, draft_vocab_size):  # T35
    _, device = loaded(8)
    reference = ReferenceSampler()
    generator = np.random.default_rng(4)
    target = generator.normal(size=(1, 2, 8)).astype(np.float32)
    draft = generator.normal(size=(1, 1, draft_vocab_size)).astype(np.float32)
    for seed in range(20):
        row = row_for(seed=seed)
        tokens = [s.propose(draft, [row], vocab_size=8) for s in (device, reference)]
        assert tokens[0] == tokens[1]
        judged = [replace(row, draft_tokens=tuple(tokens[0]), is_sampled_draft=True)]
        assert same(device.judge(target, judged)[0], reference.judge(target, judged)[0])


@pytest.mark.parametrize("mode", list(ExactnessMode))
@pytest.mark.parametrize("params", [SamplingParams(), GREEDY])
def test_a_draft_token_outside_the_vocabulary_is_rejected(loaded, mode, params):  # T35
    _, device = loaded(4)
    logits = logits_of(F1_TARGET, F1_TARGET)[None]
    (verdict,) = device.judge(logits, [row_for((4,), mode=mode, params=params, lenience=0.5)])
    assert verdict.num_accepted == 0
    assert verdict.next_token in range(4)


def test_what_the_kernels_cannot_hold_is_refused_by_name(loaded):
    _, device = loaded(4)
    with pytest.raises(EngineError, match="vocab_size 5"):
        device.propose(np.zeros((1, 1, 4), dtype=np.float32), [row_for()], vocab_size=5)
    with pytest.raises(EngineError, match="at most 4"):
        device.judge(np.zeros((1, 6, 4), dtype=np.float32), [row_for((0, 1, 2, 3, 0))])
    # Sums of more probabilities would not fit their integers.
    sizes = {"max_batch": 1, "max_gamma": 1, "vocab_size": (1 << 20) + 1}
    with pytest.raises(EngineError, match=r"vocabulary of 1048577: .* at most 1048576"):
        DeviceSampler(HostKernels(), device=HostDevice(), **sizes)
