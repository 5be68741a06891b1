"""The sampler's kernels on the host: cuts, bits in every order of threads, launches, mutants.

Laws, whole rounds and batches of every kind are in ``test_sampler_laws``, ``test_round``, ``test_sampler`` and
``test_kernel_batches``.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.accelerators.device.base import HostDevice
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.engines.sampling.noise import NoiseSource, Purpose

from tests.emulation.kernels.host import _SOURCE, HostKernels, library
from tests.engines.accelerators.device.device_laws import MAX_GAMMA, laws_of
from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import TableNoise, logits_of
from tests.engines.sampling.mixed_batches import check_mixed_batch, drafted_by, mixed_rows

ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


class Counting(HostKernels):
    """Counts launches by kernel."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.launched: Counter[str] = Counter()

    def launch(self, name: str, width: int, height: int, arguments: Sequence[int]) -> None:
        self.launched[name] += 1
        super().launch(name, width, height, arguments)


def opened(kernels: HostKernels, vocab_size: int, noise: NoiseSource | None = None):
    return DeviceSampler(
        kernels,
        max_batch=4,
        max_gamma=MAX_GAMMA,
        vocab_size=vocab_size,
        device=HostDevice(),
        noise=noise,
    )


@pytest.mark.parametrize("top_k", [1, 700, 2999])
def test_a_cut_among_more_near_values_than_are_sorted_is_exact(top_k: int) -> None:
    """All lie in one bin, so the place is bisected; ties go to lower ids."""
    logits = np.full((1, 3000), 1.0, dtype=np.float32)
    logits[0, 1::2] = np.nextafter(np.float32(1.0), np.float32(2.0))
    kept = np.flatnonzero(laws_of(row_for(params=SamplingParams(top_k=top_k)), logits)[0])
    assert kept.tolist() == sorted(np.argsort(-logits[0], kind="stable")[:top_k].tolist())


def answers_of(kernels: HostKernels, vocab_size: int, seed: int):
    """What a batch of every kind is answered, to the last bit."""
    generator = np.random.default_rng([vocab_size, seed])
    history = generator.integers(0, vocab_size, 12)
    rows = mixed_rows(generator, vocab_size, history)
    logits = generator.normal(scale=3, size=(4, MAX_GAMMA, vocab_size)).astype(np.float32)
    near = logits + generator.normal(scale=0.5, size=logits.shape).astype(np.float32)
    sampler = opened(kernels, vocab_size)
    steps = [np.ascontiguousarray(near[:, step : step + 1]) for step in range(MAX_GAMMA - 1)]
    drafts = drafted_by(sampler, rows, steps, vocab_size)
    judged = [
        replace(
            row,
            draft_tokens=draft,
            is_sampled_draft=not row.params.is_greedy and row.mode is not ExactnessMode.SEED_STABLE,
        )
        for row, draft in zip(rows, drafts, strict=True)
    ]
    verdicts = sampler.judge(logits, judged)
    sampler.close()
    return repr((drafts, verdicts))


@pytest.mark.parametrize("vocab_size", [50, 1000])
def test_bits_are_the_same_for_every_number_and_order_of_threads(vocab_size: int) -> None:
    ways = [(threads, order) for threads in (64, 256, 1024) for order in (0, 1, 7)]
    for seed in range(2 if vocab_size == 50 else 1):
        found = {
            answers_of(HostKernels(library(threads), order=order), vocab_size, seed)
            for threads, order in ways
        }
        assert len(found) == 1


def test_a_call_is_one_launch_to_propose_and_two_to_judge() -> None:
    kernels = Counting()
    sampler = opened(kernels, 8)
    logits = np.random.default_rng(0).normal(size=(2, 2, 8)).astype(np.float32)
    plain = [SamplingParams(top_p=0.9, top_k=5), SamplingParams(temperature=0.0)]
    lists = [SamplingParams(logit_bias=((1, 1.0),)), SamplingParams()]
    for params, extra in ((plain, 0), (lists, 1)):
        rows = [
            row_for(index=i, slot=i, params=one, mode=ExactnessMode.SEED_STABLE)
            for i, one in enumerate(params)
        ]
        kernels.launched.clear()
        (first, second) = sampler.propose(logits[:, :1], rows, vocab_size=8)
        judged = [
            replace(row, draft_tokens=(token,))
            for row, token in zip(rows, (first, second), strict=True)
        ]
        sampler.judge(logits, judged)
        expected = {"propose": 1, "test_drafts": 1, "answer": 1, "process": 2 * extra}
        assert kernels.launched == {name: count for name, count in expected.items() if count}
    sampler.close()


@pytest.mark.long
def test_undefined_behaviour_is_not_relied_on() -> None:
    path = library(64, options=("-fsanitize=undefined", "-fno-sanitize-recover=all"))
    plain = answers_of(HostKernels(), 1000, 0)
    assert answers_of(HostKernels(path), 1000, 0) == plain


@pytest.mark.long
@pytest.mark.parametrize("compute_capability", ARCHITECTURES)
def test_it_compiles_for_every_gpu_without_spilling(
    compute_capability: str, tmp_path: Path
) -> None:
    kernels = pytest.importorskip("outrider.engines.accelerators.device.sampling.kernels.compiled")
    if reason := kernels.why_no_compiler(compute_capability):
        pytest.skip(reason)
    code = tmp_path / "sampler.cubin"
    code.write_bytes(kernels.compile_kernels(compute_capability))
    assert code.stat().st_size < 1 << 20


def check_batches(kernels: HostKernels) -> None:
    sampler = opened(kernels, 8)
    for seed in range(60):
        check_mixed_batch(sampler, seed)


def check_ties_of_the_peak(kernels: HostKernels) -> None:
    logits = np.array([[1.0, 1.0, 0.0]], dtype=np.float32)
    law = laws_of(row_for(params=SamplingParams(min_p=1.0)), logits, kernels)[0]
    assert law.tolist() == [0.5, 0.5, 0.0]


def judged_at(kernels: HostKernels, target: list[float], draw: float, coin: float):
    """The verdict on a token drawn from [1/2, 1/2, 0, 0] by ``draw``, which ``coin`` judges."""
    noise = TableNoise()
    sampler = opened(kernels, 4, noise=noise)
    noise.tables = [
        {(Purpose.DRAFT, 1): draw, (Purpose.ACCEPT, 1): coin, (Purpose.RECOVER, 1): 0.9}
    ]
    row = row_for(seed=0)
    (token,) = sampler.propose(logits_of([0.5, 0.5, 0.0, 0.0])[None], [row], vocab_size=4)
    judged = replace(row, draft_tokens=(token,), is_sampled_draft=True)
    (verdict,) = sampler.judge(logits_of(target, target)[None], [judged])
    return verdict


def check_coin_at_the_ratio(kernels: HostKernels) -> None:
    assert judged_at(kernels, [0.25, 0.75, 0.0, 0.0], 0.0, 0.5).num_accepted == 0
    assert judged_at(kernels, [0.25, 0.75, 0.0, 0.0], 0.0, 0.5 - 2.0**-30).num_accepted == 1


def check_empty_residual(kernels: HostKernels) -> None:
    verdict = judged_at(kernels, [0.5 + 1e-7, 0.5 - 1e-7, 0.0, 0.0], 0.9, 1.0 - 2.0**-30)
    assert (verdict.num_accepted, verdict.num_fallbacks) == (0, 1)


CHECKS = (check_batches, check_ties_of_the_peak, check_coin_at_the_ratio, check_empty_residual)


@pytest.mark.parametrize("check", CHECKS)
def test_what_kills_mutants_holds(check: Callable[[HostKernels], None]) -> None:
    check(HostKernels())


# Old text, new text, and what fails on it: each changes what a kernel computes.
MIXED = check_batches
MUTANTS = {
    "no tie goes to the lower id": ("return (u64)key << 32 | (u32)~id", "return (u64)key << 32 | (u32)id", MIXED),
    "the last id kept is dropped": ("key == c.key && id > c.id", "key == c.key && id >= c.id", MIXED),
    "temperature is forgotten": ("c.temperature = settings[sTemperature];", "", MIXED),
    "top-p stops early": ("run < wanted && run + size >= wanted : (u64)i", "run + size < wanted : (u64)i", MIXED),
    "top-k keeps one more": ("V, bin, top_k - before,", "V, bin, top_k - before + 1,", MIXED),
    "top-p forgets top-k": ("        all = mass_before + mass;\n", "", MIXED),
    "drafted tokens are not penalised": ("number += draft_tokens[i] == id", "number += 0", MIXED),
    "penalties fall on raw logits of both signs alike": ("x > 0.0f ? up : down", "up", MIXED),
    "bans come too early": ("position < (int)counts[cEndBanned]", "position <= (int)counts[cEndBanned]", MIXED),
    "bad words match anywhere": ("is_due = wanted[j] == kNoToken || wanted[j] == token", "is_due = true", MIXED),
    "a rejected token may be drawn again": ("id), -own_q), 0.0f)", "id), 0.0f), 0.0f)", MIXED),
    "lenience is forgotten": ("__fmul_rn(own_q, settings[sLenience])", "own_q", MIXED),
    "a race is not run to its end": ("int id = block * 8 + i;", "int id = block * 8 + i / 2;", MIXED),
    "noise of the next position": ("u64 x0 = block + 1, x1 = position", "u64 x0 = block + 1, x1 = position + 1", MIXED),
    "min-p is strict": ("return w >= c.min_p ?", "return w > c.min_p ?", check_ties_of_the_peak),
    "equality accepts": ("(u64)coins[at]) < target", "(u64)coins[at]) <= target", check_coin_at_the_ratio),
    "the residual's emptiness is not told": ("fallback = 1;", "", check_empty_residual),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    old, new, check = MUTANTS[name]
    text = _SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, "the mutant's place"
    source = tmp_path / _SOURCE.name
    source.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(AssertionError):
        check(HostKernels(library(64, source=source)))


def test_a_compiler_that_refuses_says_why(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / _SOURCE.name
    source.write_text(_SOURCE.read_text(encoding="utf-8") + "\nnonsense;\n", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        library(64, source=source)
    assert "nonsense" in refused.value.stderr
