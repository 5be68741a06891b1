"""One forward pass over a filled cache, of our canonical graph or of onnxruntime-genai's, ready to time.

Both run in this process, on one onnxruntime and its one shared thread pool, with the caches bound in place.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from outrider.engines.base import FloatArray
from outrider.engines.bundle.manifest import LOGIT_POSITIONS, LOGITS, START, TOKENS
from outrider.engines.onnx.packed_inputs import PackedGraph, packed_feeds
from outrider.engines.onnx.session import open_session

_WARM_UP = 10
_GENAI_TOKENS, _GENAI_MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is timed: ``num_tokens`` fed to one row of ``length`` cached tokens in a cache of ``capacity``."""

    num_tokens: int
    length: int
    capacity: int


class GraphRun:
    """A graph with a cache of one row, in place.

    Args:
        path: ``model.onnx`` or ``grouped.onnx`` of a bundle's part or of a folder that genai's model builder wrote.
        capacity: S of the cache.
        threads: size of the shared pool.
    """

    def __init__(self, path: Path, *, capacity: int, threads: int) -> None:
        self._session = open_session(path, num_threads=threads)
        names = {tensor.name for tensor in self._session.get_inputs()}
        self._is_genai = _GENAI_TOKENS in names
        self._capacity = capacity
        head_size = _genai_head_size(path.parent) if self._is_genai else None
        self._caches = {
            tensor.name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros((1, tensor.shape[1], capacity, head_size or tensor.shape[3]), np.float32)
            )
            for tensor in self._session.get_inputs()
            if tensor.name.startswith(("key.", "value.", "past_key_values."))
        }
        self._packed = PackedGraph.of(
            {tensor.name: tensor.shape for tensor in self._session.get_inputs()},
            num_kv_heads=next(iter(self._caches.values())).shape()[1],
            last=capacity - 1,
        )

    def bind(self, tokens: FloatArray, start: int) -> Any:
        """Binding of an extend by tokens [T] int64 from ``start`` on; may be run any number of times."""
        binding = self._session.io_binding()
        for name, values in self._scalars(tokens, start).items():
            binding.bind_cpu_input(name, values)
        for name, cache in self._caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(self._output_name(name), cache)
        binding.bind_output(LOGITS, "cpu")
        return binding

    def run(self, binding: Any) -> None:
        """Extend once."""
        self._session.run_with_iobinding(binding)

    def logits(self, tokens: FloatArray, start: int) -> FloatArray:
        """Logits [T, V] float32 of an extend."""
        binding = self.bind(tokens, start)
        self.run(binding)
        logits: FloatArray = binding.get_outputs()[-1].numpy()[0]
        return logits

    def _scalars(self, tokens: FloatArray, start: int) -> dict[str, Any]:
        row = tokens[None].astype(np.int64)
        if self._is_genai:
            return {_GENAI_TOKENS: row, _GENAI_MASK: np.ones((1, start + row.shape[1]), np.int64)}
        starts, columns = np.array([start]), np.arange(row.shape[1])[None]
        if self._packed is not None:
            return dict(packed_feeds(self._packed, row, starts, capacity=self._capacity))
        return {TOKENS: row, START: starts, LOGIT_POSITIONS: columns}

    def _output_name(self, name: str) -> str:
        if self._is_genai:
            return name.replace("past_key_values", "present")
        return f"new_{name}"


def _genai_head_size(folder: Path) -> int:
    """Head size of a model of genai's builder, which leaves it symbolic in the graph."""
    config = json.loads((folder / "genai_config.json").read_text())
    return int(config["model"]["decoder"]["head_size"])


def timed_step(run: GraphRun, tokens: FloatArray, shape: Shape) -> Callable[[], None]:
    """The extend of ``shape`` over a cache that holds the first ``shape.length`` of tokens."""
    run.logits(tokens[: shape.length], 0)
    binding = run.bind(tokens[shape.length : shape.length + shape.num_tokens], shape.length)
    return lambda: run.run(binding)


def interleaved_times(steps: list[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Milliseconds of each step [steps, repeats], the steps taking turns and the order turning too."""
    times: list[list[float]] = [[] for _ in steps]
    pairs = list(zip(steps, times, strict=True))
    for turn in range(_WARM_UP + repeats):
        for step, samples in pairs if turn % 2 else reversed(pairs):
            begin = time.perf_counter()
            step()
            if turn >= _WARM_UP:
                samples.append((time.perf_counter() - begin) * 1e3)
    return times


def medians(times: list[list[float]]) -> list[float]:
    """Median of each step's samples."""
    return [statistics.median(samples) for samples in times]
