"""Time one step of two float32 canonical graphs against each other, interleaved.

Both graphs run in turn within one process, so that a load beside the measurement meets both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime
import typer
from rich.console import Console
from rich.table import Table

from engines.bundle import LOGIT_POSITIONS, LOGITS, START, TOKENS
from engines.onnx_session import open_session

_WARM_UP = 10


def make_step(
    path: Path, *, num_tokens: int, length: int, capacity: int, threads: int
) -> Callable[[], None]:
    """One extend of one row from ``length`` cached tokens, caches bound in place."""
    session = open_session(path, num_threads=threads)
    random = np.random.default_rng(0)
    binding = session.io_binding()
    scalars = {
        TOKENS: random.integers(0, 100, (1, num_tokens)),
        START: np.array([length]),
        LOGIT_POSITIONS: np.arange(num_tokens)[None],
    }
    for tensor in session.get_inputs():
        if tensor.name in scalars:
            binding.bind_cpu_input(tensor.name, scalars[tensor.name].astype(np.int64))
            continue
        shape = (1, tensor.shape[1], capacity, tensor.shape[3])
        values = random.standard_normal(shape).astype(np.float32)
        cache = onnxruntime.OrtValue.ortvalue_from_numpy(values)
        binding.bind_ortvalue_input(tensor.name, cache)
        binding.bind_ortvalue_output(f"new_{tensor.name}", cache)
    binding.bind_output(LOGITS, "cpu")
    return lambda: session.run_with_iobinding(binding)


def interleaved_medians(steps: list[Callable[[], None]], repeats: int) -> list[float]:
    """Median milliseconds of each step, the steps taking turns."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(_WARM_UP + repeats):
        for step, samples in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            if turn >= _WARM_UP:
                samples.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(samples) for samples in times]


def main(
    before: Annotated[Path, typer.Argument(help="model.onnx")],
    after: Annotated[Path, typer.Argument(help="model.onnx")],
    repeats: int = 200,
    length: int = 200,
    capacity: int = 256,
    threads: int = 2,
) -> None:
    """Print the median step of both graphs at 2 and 5 tokens."""
    table = Table("tokens", "before ms", "after ms", "before / after")
    for num_tokens in (2, 5):
        steps = [
            make_step(
                path, num_tokens=num_tokens, length=length, capacity=capacity, threads=threads
            )
            for path in (before, after)
        ]
        first, second = interleaved_medians(steps, repeats)
        table.add_row(str(num_tokens), f"{first:.3f}", f"{second:.3f}", f"{first / second:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
