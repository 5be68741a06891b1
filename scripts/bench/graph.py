"""Time one step of two canonical graphs against each other, in turn.

Both graphs run within one process, on one onnxruntime and one thread pool, with the caches bound in place: a load
beside the measurement meets both. They lie on huge pages where the system has them: without, a graph is up to a fifth
slower or quicker by where its weights happen to lie.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from outrider.engines.base import IntArray
from outrider.engines.bundle.names import LOGIT_POSITIONS, LOGITS, START, TOKENS
from outrider.engines.huge_pages import use_everywhere
from outrider.engines.onnx.packed_inputs import PackedGraph, packed_feeds
from outrider.engines.onnx.session import open_session

from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.tables import show

_NUM_IDS = 100  # any vocabulary has as many
_WARM_UP = 10


class GraphRun:
    """A graph with a cache of one row, in place.

    Args:
        path: ``model.onnx`` or ``grouped.onnx`` of a bundle's part.
        capacity: S of the cache.
        threads: size of the shared pool.
    """

    def __init__(self, path: Path, *, capacity: int, threads: int) -> None:
        self._session = open_session(path, num_threads=threads)
        self._capacity = capacity
        inputs = {tensor.name: tensor.shape for tensor in self._session.get_inputs()}
        self._caches = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros((1, shape[1], capacity, shape[3]), np.float32)
            )
            for name, shape in inputs.items()
            if name.startswith(("key.", "value."))
        }
        num_kv_heads = next(iter(self._caches.values())).shape()[1]
        self._packed = PackedGraph.of(inputs, num_kv_heads=num_kv_heads, last=capacity - 1)

    def step(self, tokens: IntArray, start: int) -> Callable[[], None]:
        """Return an extend by tokens [T] int64 from ``start`` on; it may be called any number of times."""
        binding = self._session.io_binding()
        for name, values in self._feeds(tokens, start).items():
            binding.bind_cpu_input(name, values)
        for name, cache in self._caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(f"new_{name}", cache)
        binding.bind_output(LOGITS, "cpu")
        return lambda: self._session.run_with_iobinding(binding)

    def _feeds(self, tokens: IntArray, start: int) -> dict[str, Any]:
        row, starts = tokens[None].astype(np.int64), np.array([start])
        if self._packed is not None:
            return dict(packed_feeds(self._packed, row, starts, capacity=self._capacity))
        return {TOKENS: row, START: starts, LOGIT_POSITIONS: np.arange(row.shape[1])[None]}


def median_times(steps: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Return the median milliseconds of each step; the steps take turns, and the order turns too."""
    times: list[list[float]] = [[] for _ in steps]
    pairs = list(zip(steps, times, strict=True))
    for turn in range(_WARM_UP + repeats):
        for step, samples in pairs if turn % 2 else reversed(pairs):
            began = time.perf_counter()
            step()
            if turn >= _WARM_UP:
                samples.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(samples) for samples in times]


def main(
    before: Annotated[Path, typer.Argument(help="model.onnx or grouped.onnx")],
    after: Annotated[Path, typer.Argument(help="model.onnx or grouped.onnx")],
    repeats: int = 200,
    length: int = 200,
    capacity: int = 256,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Print the median step of both graphs at 1, 2 and 5 tokens."""
    recorder = Recorder("graph", "one step of two graphs, in turn", threads)
    runs = [GraphRun(path, capacity=capacity, threads=threads) for path in (before, after)]
    use_everywhere()
    tokens = np.random.default_rng(0).integers(0, _NUM_IDS, capacity)
    for run in runs:
        run.step(tokens[:length], 0)()
    rows = []
    for num_tokens in (1, 2, 5):
        steps = [run.step(tokens[length : length + num_tokens], length) for run in runs]
        first, second = median_times(steps, repeats)
        figures = {"before_ms": first, "after_ms": second, "ratio": first / second}
        rows.append(Row(case={"num_tokens": num_tokens}, figures=figures))
    show(rows)
    settings = {
        "before": str(before), "after": str(after), "repeats": repeats, "length": length, "capacity": capacity,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
