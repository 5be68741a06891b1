"""The first command: the sampler's kernels, rates, and PyTorch, on a machine without ONNX Runtime's provider."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from scripts.gpu import kernels
from scripts.gpu.first import roof
from scripts.gpu.first.formula import SHAPES, Rates, launches_of
from scripts.gpu.first.job import Job, Parts
from scripts.gpu.machine import measure_rates

# Tokens that decoding reads of, and shapes of calls: a step, a verification, one of a batch.
_CONTEXTS, _CALLS = (200, 2000, 8000), ((1, 1), (1, 5), (8, 1), (8, 5))
_PREFILL = roof.Call(rows=1, tokens=512, context=0)


def find_rates(job: Job) -> Mapping[str, Any]:
    """Measure copies, products, launches and waits."""
    return asdict(measure_rates(job.device, "float16")) | roof.launch_times(job.torch_device)


def find_kernels(job: Job) -> Mapping[str, Any]:
    """Compare the kernels' answers with a CPU's, and time their launches."""
    expected = json.loads((job.carried / "kernels.json").read_text(encoding="utf-8"))
    return kernels.compare_and_time(expected, job.device)


def find_roof(job: Job) -> Mapping[str, Any]:
    """Time PyTorch on models of 1B and 8B, and say how many launches a layer that would be by the formula."""
    device, rates = job.torch_device, measure_rates(job.device, "float16")
    found: dict[str, Any] = {}
    for name in ("tiny",) if job.is_small else ("1B", "8B"):
        contexts = (16,) if job.is_small else _CONTEXTS
        calls = [
            roof.Call(rows=rows, tokens=tokens, context=context)
            for context in contexts
            for rows, tokens in _CALLS
        ]
        times = roof.time_model(SHAPES[name], [*calls, _PREFILL], device)
        measured = Rates(bytes_per_s=rates.bytes_per_s)
        for one in times:
            if one["tokens"] == 1:
                step_s = 1e-3 * float(one["graph_ms"] or one["ms"] or 0.0)
                sizes = {"rows": int(one["rows"] or 0), "context": int(one["context"] or 0)}
                one["launches_by_formula"] = launches_of(step_s, SHAPES[name], measured, **sizes)
        found[name] = times
    return found


PARTS: Parts = {
    "rates": (60.0, find_rates),
    "kernels": (180.0, find_kernels),
    "roof": (240.0, find_roof),
}
