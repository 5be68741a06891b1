"""One command on a GPU machine: what only a GPU can show, as a report.

    python -m scripts.gpu_check BUNDLE --device tensorrt:0 --report docs/gpu.md

Runs the engine contract, the parity of logits and whole rounds on the device, times the shapes of a step against
their floor (bytes of weights and cache over the measured copy bandwidth, products over the measured
matrix rate), and writes what it found with device, versions and date. ``--device cpu`` runs the same
code on the host.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import typer

from engines import choose_device, open_engine
from engines.base import Engine, FloatArray, Span
from engines.bundle import Bundle, ModelEntry, load_bundle
from scripts.gpu_rounds import check_rounds
from scripts.gpu_rounds import render as render_rounds

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13-libs", "cuda-bindings")
CONTRACT = Path(__file__).parents[1] / "tests" / "engines" / "device_contract.py"
# 50 prompts of 128 tokens, teacher-forced.
PARITY_PROMPTS, PARITY_TOKENS = 50, 128
GREEDY_AGREEMENT = 0.995
_COPY_BYTES, _MATRIX = 1 << 27, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One shape: median seconds of an extend, and the least the machine could need for it."""

    part: str
    batch: int
    tokens: int
    median_s: float
    floor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Logits of a device against those of ONNX Runtime's CPU in float32."""

    part: str
    max_difference: float
    num_greedy_equal: int
    num_compared: int

    @property
    def has_passed(self) -> bool:
        """Whether the greedy choices agree as often as promised."""
        return self.num_greedy_equal >= GREEDY_AGREEMENT * self.num_compared


def check_parity(
    bundle: Bundle, device: str, part: str, *, num_prompts: int, num_tokens: int
) -> Parity:
    """Teacher-forced logits of random prompts on a device and on the CPU."""
    engines = [open_engine(bundle, part, device=name, max_batch=1) for name in (device, "cpu")]
    rng = np.random.default_rng(0)
    worst, equal, compared = 0.0, 0, 0
    for _ in range(num_prompts):
        tokens = rng.integers(0, engines[0].limits.vocab_size, num_tokens)
        found, expected = (_whole(engine, tokens.tolist()) for engine in engines)
        worst = max(worst, float(np.abs(found - expected).max()))
        equal += int((found.argmax(-1) == expected.argmax(-1)).sum())
        compared += num_tokens
    for engine in engines:
        engine.close()
    return Parity(part=part, max_difference=worst, num_greedy_equal=equal, num_compared=compared)


def time_shapes(
    bundle: Bundle, device: str, part: str, *, rates: tuple[float, float], repeats: int
) -> list[Timing]:
    """Median times of the step and verify shapes of a model, at batch 1 and at the greatest."""
    engine = open_engine(bundle, part, device=device)
    entry = bundle.manifest.target if part == "target" else bundle.manifest.draft
    assert entry is not None
    shapes = {
        (batch, tokens)
        for batch in (1, engine.limits.max_batch)
        for tokens in (1, bundle.manifest.max_gamma + 1)
    }
    timings = []
    for batch, tokens in sorted(shapes):
        spans = [
            Span(slot=slot, start=0, tokens=(1,) * tokens, num_logits=tokens)
            for slot in range(batch)
        ]
        median_s = _median_s(lambda spans=spans: engine.extend(spans), repeats)
        floor_s = floor_seconds(bundle, entry, batch, tokens, rates)
        timings.append(
            Timing(part=part, batch=batch, tokens=tokens, median_s=median_s, floor_s=floor_s)
        )
    engine.close()
    return timings


def floor_seconds(
    bundle: Bundle, entry: ModelEntry, batch: int, tokens: int, rates: tuple[float, float]
) -> float:
    """Least seconds of an extend: every weight is read once and used twice per token.

    Args:
        bundle: of the model.
        entry: the model.
        batch: rows.
        tokens: of a row.
        rates: bytes per second of a copy (read and write counted once), and products per second.
    """
    weight_bytes = bundle.manifest.files[f"{entry.path}/model.onnx.data"].size
    cache_bytes = 2 * 4 * entry.num_layers * entry.num_kv_heads * entry.head_size * batch * tokens
    item_bytes = {"float32": 4, "float16": 2, "int8": 1, "int4": 0.5}[entry.weights]
    products = weight_bytes / item_bytes * batch * tokens
    return max((weight_bytes + cache_bytes) / rates[0], products / rates[1])


def measure_rates(device: str) -> tuple[float, float]:
    """Bytes per second of a copy, and multiply-adds per second of a matrix product, on a device.

    On a GPU the copy is CUDA's own; products run through ONNX Runtime or numpy on the host only, so
    there the rate is left infinite and the floor is that of memory.
    """
    if device == "cpu":
        source = np.ones(_COPY_BYTES, dtype=np.uint8)
        copy_s = _median_s(source.copy, 5)
        matrix = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
        product_s = _median_s(lambda: matrix @ matrix, 3)
        return _COPY_BYTES / copy_s, _MATRIX**3 / product_s
    from engines.cuda_device import CudaDevice
    from engines.plan_device import Rows

    cuda = CudaDevice(int(device.partition(":")[2] or 0))
    pointers = [cuda.allocate(_COPY_BYTES) for _ in range(2)]
    rows = [Rows(pointer, _COPY_BYTES) for pointer in pointers]

    def copy() -> None:
        cuda.copy_rows(rows[0], rows[1], width=_COPY_BYTES, rows=1)
        cuda.wait()

    copy_s = _median_s(copy, 20)
    for pointer in pointers:
        cuda.free(pointer)
    cuda.close()
    return _COPY_BYTES / copy_s, float("inf")


def machine(device: str) -> dict[str, str]:
    """What a figure is worth only together with: device, versions, date."""
    facts = {
        "device": device,
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device != "cpu":
        from engines.cuda_device import compute_capability, device_name

        index = int(device.partition(":")[2] or 0)
        facts["gpu"] = f"{device_name(index)} (compute capability {compute_capability(index)})"
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def render(
    facts: dict[str, str], reason: str, contract: str, parities: list[Parity], timings: list[Timing]
) -> str:
    """The report as Markdown, with every figure once more as JSON."""
    lines = ["# GPU check", "", *(f"* {name}: {value}" for name, value in facts.items())]
    lines += [f"* chosen because: {reason}", f"* engine contract: {contract}", ""]
    lines += [
        "| model | largest logit difference | greedy agreement | passed |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.part} | {one.max_difference:.3g} | {one.num_greedy_equal}/{one.num_compared} "
        f"| {'yes' if one.has_passed else 'NO'} |"
        for one in parities
    ]
    lines += [
        "",
        "| model | rows | tokens | median, ms | floor, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.part} | {one.batch} | {one.tokens} | {1e3 * one.median_s:.3f} "
        f"| {1e3 * one.floor_s:.3f} | {one.median_s / one.floor_s:.2f} |"
        for one in timings
    ]
    data = {
        "parity": [asdict(one) for one in parities],
        "timings": [asdict(one) for one in timings],
    }
    return "\n".join([*lines, "", "```json", json.dumps(data, indent=2), "```", ""])


def run_contract(bundle: Bundle, device: str, parts: tuple[str, ...]) -> bool:
    """The engine contract's own tests over a bundle's models on a device."""

    class Engines:
        """Gives the contract its engines."""

        @pytest.fixture(params=parts)
        def make_engine(self, request: pytest.FixtureRequest) -> Callable[[], Engine]:
            return lambda: open_engine(bundle, request.param, device=device, max_batch=3)

    arguments = ["-q", "-p", "no:cacheprovider", str(CONTRACT)]
    return pytest.main(arguments, plugins=[Engines()]) == pytest.ExitCode.OK


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with plans for this machine.")],
    device: Annotated[str, typer.Option(help="As outrider serve takes it.")] = "auto",
    report: Annotated[Path, typer.Option(help="File to write.")] = Path("gpu_check.md"),
    num_prompts: Annotated[int, typer.Option(min=1)] = PARITY_PROMPTS,
    num_tokens: Annotated[int, typer.Option(min=1)] = PARITY_TOKENS,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of a shape.")] = 50,
) -> None:
    """Check and time a bundle on a device; the exit code says whether all checks passed."""
    loaded = load_bundle(bundle)
    choice = choose_device(device, loaded)
    name = str(choice.device)
    parts = ("target",) if loaded.manifest.draft is None else ("target", "draft")
    has_kept = run_contract(loaded, name, parts)
    parities = [
        check_parity(loaded, name, part, num_prompts=num_prompts, num_tokens=num_tokens)
        for part in parts
    ]
    rates = measure_rates(name)
    timings = [
        timing
        for part in parts
        for timing in time_shapes(loaded, name, part, rates=rates, repeats=repeats)
    ]
    contract = "passed" if has_kept else "FAILED"
    sizes = {"num_prompts": min(num_prompts, 8), "num_tokens": min(num_tokens, 64)}
    rounds = check_rounds(loaded, name, **sizes)
    text = render(machine(name), choice.reason, contract, parities, timings)
    text += "\n".join([*render_rounds(rounds), ""])
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text, encoding="utf-8")
    typer.echo(text)
    if not (has_kept and rounds.has_passed and all(one.has_passed for one in parities)):
        raise typer.Exit(1)


def _whole(engine: Engine, tokens: list[int]) -> FloatArray:
    span = Span(slot=0, start=0, tokens=tuple(tokens), num_logits=len(tokens))
    return engine.extend([span])[0, : len(tokens)].copy()


def _median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    typer.run(main)
