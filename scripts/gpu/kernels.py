"""The sampler's kernels on a GPU: the bits that they have on a CPU, and the time of their launches.

    python -m scripts.gpu.kernels write DIGESTS       # here: answers to random batches, by the host's kernels
    python -m scripts.gpu.kernels compare DIGESTS     # on the GPU's machine: the same answers, then times

The host's kernels are the same source compiled by the C++ compiler that is here (``tests/emulation/kernels``).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from outrider.engines.accelerators.device.base import HostDevice, PlanDevice
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.kernels.launches import Kernels
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.accelerators.device.sampling.tensors import Count, Rule, Setting
from outrider.engines.devices import CPU, Device, parse_device
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow

app = typer.Typer()
_HISTORY, _PROMPT = 20, 8
_LENIENCE = 0.7
_CALLS = 20


class Batches(NamedTuple):
    """Random batches of one size."""

    count: int
    vocab_size: int
    num_rows: int
    gamma: int


ALL = (
    Batches(60, 50, 6, 3),
    Batches(40, 1000, 6, 4),
    Batches(10, 20_000, 4, 3),
    Batches(4, 151_936, 2, 3),
)
# For a test of this file.
FEW = (Batches(6, 50, 6, 3),)
TIMED = ((1, 1), (1, 5), (8, 5), (64, 9))


def random_params(generator: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Sampling parameters of every kind that the kernels have."""
    is_chosen = iter(generator.random(9) < (0.4, 0.5, 0.3, 0.3, 0.2, 0.3, 0.1, 0.2, 0.2))

    def maybe(value: Any, default: Any) -> Any:
        return value if next(is_chosen) else default

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.choice(vocab_size, count, replace=False).tolist())

    return SamplingParams(
        temperature=float(generator.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_k=maybe(int(generator.integers(1, min(vocab_size, 300))), 0),
        top_p=maybe(float(generator.uniform(0.2, 0.99)), 1.0),
        min_p=maybe(float(generator.uniform(0.0, 0.2)), 0.0),
        repetition_penalty=maybe(float(generator.uniform(0.6, 1.8)), 1.0),
        presence_penalty=maybe(float(generator.uniform(-1.0, 1.0)), 0.0),
        logit_bias=maybe(tuple((token, float(generator.uniform(-5, 5))) for token in ids(5)), ()),
        allowed_token_ids=maybe(ids(20), ()),
        bad_words=maybe((ids(1), ids(2), ids(3)), ()),
        min_tokens=maybe(_HISTORY, 0),
        end_token_ids=ids(2),
    )


def random_rows(generator: np.random.Generator, batches: Batches) -> list[SamplingRow]:
    """Rows of a batch, in every mode."""
    rows = []
    for index in range(batches.num_rows):
        params = random_params(generator, batches.vocab_size)
        mode = list(ExactnessMode)[generator.integers(len(ExactnessMode))]
        rows.append(
            SamplingRow(
                index=index, slot=index, params=params, mode=mode, seed=int(generator.integers(1 << 62)),
                lenience=_LENIENCE if mode is ExactnessMode.LENIENT else 1.0, draft_tokens=(),
                history=generator.integers(0, batches.vocab_size, _HISTORY), num_prompt=_PROMPT, num_logprobs=3,
                is_sampled_draft=not params.is_greedy and mode is not ExactnessMode.SEED_STABLE,
            )
        )  # fmt: skip
    return rows


def digests(make: Callable[[], Kernels], device: PlanDevice, batches: Batches) -> Iterator[str]:
    """Yield a digest of drafts and verdicts of each batch, to the last bit."""
    shape = (batches.num_rows, batches.gamma + 1, batches.vocab_size)
    sampler = DeviceSampler(
        make(), max_batch=batches.num_rows, max_gamma=batches.gamma, vocab_size=batches.vocab_size, device=device
    )  # fmt: skip
    for case in range(batches.count):
        generator = np.random.default_rng([batches.vocab_size, case])
        logits = generator.normal(scale=generator.uniform(0.5, 4.0), size=shape).astype(np.float32)
        if case % 2:  # as of bfloat16: ties
            logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        near = logits + generator.normal(scale=0.7, size=shape).astype(np.float32)
        rows = random_rows(generator, batches)
        for depth in range(batches.gamma):
            step = np.ascontiguousarray(near[:, depth : depth + 1])
            tokens = sampler.propose(step, rows, vocab_size=batches.vocab_size)
            rows = [
                replace(row, draft_tokens=(*row.draft_tokens, token))
                for row, token in zip(rows, tokens, strict=True)
            ]
        answers = [
            (row.draft_tokens, verdict)
            for row, verdict in zip(rows, sampler.judge(logits, rows), strict=True)
        ]
        yield hashlib.sha256(repr(answers).encode()).hexdigest()[:16]
    sampler.close()


def launch_times(
    kernels: Kernels, device: PlanDevice, vocab_size: int, num_rows: int, positions: int
) -> Iterator[str]:
    """Yield a line of microseconds per launch of each kernel, for each rule and cut."""
    generator = np.random.default_rng(0)

    def on_device(array: np.ndarray) -> int:
        pointer, staging = device.allocate(array.nbytes), device.stage(array.nbytes)
        staging.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device.upload(pointer, staging, array.nbytes)
        device.wait()
        staging.free()
        held.append(pointer)
        return pointer

    held: list[int] = []
    shape = (num_rows, positions)
    logits = on_device(2.5 * generator.standard_normal((*shape, vocab_size), dtype=np.float32))
    kept = on_device(np.full((*shape, vocab_size), 1.0 / vocab_size, np.float32))
    settings = np.zeros((num_rows, names.NUM_SETTINGS), np.float32)
    settings[:, [Setting.TEMPERATURE, Setting.LENIENCE]] = 1.0
    setting, draws = on_device(settings), on_device(generator.integers(0, 1 << 53, shape))
    seeds = on_device(generator.integers(0, 1 << 16, (num_rows, names.SEED_LIMBS)))
    places, drafts = (
        on_device(generator.integers(0, 5000, shape)),
        on_device(generator.integers(0, vocab_size, shape)),
    )
    out, more, tests = (
        on_device(np.zeros((num_rows, 8 * (positions + 4)), np.int64)) for _ in range(3)
    )
    for rule in (Rule.RATIO, Rule.RACE):
        for top_p in (names.TOP_P_OFF, names.TOP_P_OFF * 9 // 10):
            counts = np.zeros((num_rows, names.NUM_COUNTS), np.int64)
            counts[:, [Count.RULE, Count.GAMMA, Count.TOP_K, Count.TOP_P]] = (
                rule,
                positions - 1,
                vocab_size,
                top_p,
            )
            count, sizes = on_device(counts), [vocab_size, positions, positions]
            launches = {
                "propose": (num_rows, 1, [logits, positions * vocab_size, vocab_size, *sizes, count, setting, draws,
                                          seeds, places, kept, drafts, out, more]),
                "test_drafts": (positions, num_rows, [logits, *sizes, count, setting, draws, draws, seeds, places, kept,
                                                      drafts, tests]),
                "answer": (num_rows, 1, [logits, *sizes, count, draws, kept, drafts, tests, out]),
            }  # fmt: skip
            found = []
            for name, (width, height, arguments) in launches.items():
                seconds = []
                for _ in range(3):
                    began = time.perf_counter()
                    for _ in range(_CALLS):
                        kernels.launch(name, width, height, arguments)
                    device.wait()
                    seconds.append((time.perf_counter() - began) / _CALLS)
                found.append(f"{name} {1e6 * statistics.median(seconds):.1f}")
            cut = "top-p 0.9" if top_p < names.TOP_P_OFF else "no cut"
            yield f"{num_rows} x {positions}, V {vocab_size}, {rule.name.lower()}, {cut}: {', '.join(found)} us"
    for pointer in held:
        device.free(pointer)


def open_kernels(device: Device) -> tuple[Callable[[], Kernels], PlanDevice]:
    """Return what makes a device's kernels, and its memory; a CPU's are the same source, compiled for it."""
    if device.kind == CPU:
        from tests.emulation.kernels.host import HostKernels

        return HostKernels, HostDevice()
    from outrider.engines.accelerators.device.cuda import CudaDevice
    from outrider.engines.accelerators.device.sampling.kernels.compiled import CudaKernels

    memory = CudaDevice(device.index)
    return lambda: CudaKernels(memory), memory


def compare_and_time(expected: Sequence[Mapping[str, Any]], device: Device) -> dict[str, Any]:
    """Return how many batches a device answers with the bits of a file's, and the times of its launches.

    Args:
        expected: what ``write`` wrote.
        device: whose kernels run.
    """
    make, memory = open_kernels(device)
    found: dict[str, Any] = {"num_equal": 0, "num_compared": 0}
    largest = 0
    for one in expected:
        batches = Batches(**one["batches"])
        pairs = zip(digests(make, memory, batches), one["digests"], strict=True)
        found["num_equal"] += sum(ours == theirs for ours, theirs in pairs)
        found["num_compared"] += len(one["digests"])
        largest = max(largest, batches.vocab_size)
    kernels = make()
    # A CPU's kernels are fibers: one shape of them is enough.
    shapes = TIMED if device.kind != CPU else TIMED[:1]
    found["times"] = [
        line
        for rows, width in shapes
        for line in launch_times(kernels, memory, largest, rows, width)
    ]
    kernels.close()
    memory.close()
    return found


@app.command()
def write(file: Path, few: bool = False) -> None:
    """Write the digests of the host's kernels."""
    make, memory = open_kernels(Device(CPU))
    found = [
        {"batches": batches._asdict(), "digests": [*digests(make, memory, batches)]}
        for batches in (FEW if few else ALL)
    ]
    file.write_text(json.dumps(found), encoding="utf-8")
    typer.echo(f"{sum(len(one['digests']) for one in found)} batches")


@app.command()
def compare(file: Path, device: str = "cuda:0") -> None:
    """Compare them with a device's, and time its kernels; exit code 1 where a digest differs."""
    where = parse_device(device)
    assert where is not None
    found = compare_and_time(json.loads(file.read_text(encoding="utf-8")), where)
    for line in found["times"]:
        typer.echo(line)
    typer.echo(f"{found['num_equal']} of {found['num_compared']} batches have the host's bits")
    raise typer.Exit(int(found["num_equal"] != found["num_compared"]))


if __name__ == "__main__":
    app()
