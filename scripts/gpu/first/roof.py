"""What PyTorch takes for a step of a Llama of random weights: in a CUDA graph on a GPU, a bound for all others.

It knows neither bundle nor project: matrices, a cache of fixed size, fused attention, one loop of layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from scripts.gpu.first.formula import ModelShape

_CALLS, _ROUNDS, _WARM_CALLS = 20, 3, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Shape of a call: rows, tokens of each, and tokens that are cached before them."""

    rows: int
    tokens: int
    context: int


class Model:
    """Layers of random weights on a device; all layers have matrices of their own, which must be read."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.float32 if device.type == "cpu" else torch.float16
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        sizes = [
            (shape.hidden, heads),
            (shape.heads * shape.head_size, shape.hidden),
            (shape.hidden, 2 * shape.inner),
            (shape.inner, shape.hidden),
        ]
        self.layers = [[self._random(*size) for size in sizes] for _ in range(shape.layers)]
        self.head = self._random(shape.hidden, shape.vocab)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype).mul_(size[0] ** -0.5)

    def prepare(self, call: Call) -> Callable[[], torch.Tensor]:
        """Return a call of the model over caches and inputs of its own; it returns [B, T, V] logits."""
        shape, width = self.shape, call.context + call.tokens
        cached = (shape.layers, 2, call.rows, shape.kv_heads, width, shape.head_size)
        cache = torch.randn(*cached, device=self.device, dtype=self.dtype)
        hidden = self._random(call.rows, call.tokens, shape.hidden)
        angles = self._random(call.tokens, shape.head_size)
        columns = torch.arange(width, device=self.device)
        mask = columns <= call.context + columns[: call.tokens, None]
        return lambda: self._forward(
            call, hidden, angles, cache, None if call.tokens == 1 else mask
        )

    def _forward(
        self, call: Call, hidden: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        shape, norm = self.shape, (self.shape.hidden,)
        sizes = [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        for (into, out, up, down), (keys, values) in zip(self.layers, cache, strict=True):
            parts = (rms_norm(hidden, norm) @ into).split(sizes, dim=-1)
            query, key, value = (
                part.view(call.rows, call.tokens, -1, shape.head_size).transpose(1, 2)
                for part in parts
            )
            keys[:, :, call.context :] = key * angles
            values[:, :, call.context :] = value
            seen = scaled_dot_product_attention(
                query * angles, keys, values, attn_mask=mask, enable_gqa=True
            )
            hidden = hidden + seen.transpose(1, 2).flatten(2) @ out
            gate, inner = (rms_norm(hidden, norm) @ up).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * inner) @ down
        return rms_norm(hidden, norm) @ self.head


def time_model(
    shape: ModelShape, calls: list[Call], device: torch.device
) -> list[dict[str, float | None]]:
    """Return milliseconds of each call, one after another and in a CUDA graph; None where there is none."""
    model, found = Model(shape, device), []
    for call in calls:
        run = model.prepare(call)
        with torch.inference_mode():
            plain_s = _seconds(run, device)
            recorded_s = None if device.type == "cpu" else _seconds(_recorded(run), device)
        found.append(
            asdict(call)
            | {"ms": 1e3 * plain_s, "graph_ms": None if recorded_s is None else 1e3 * recorded_s}
        )
    return found


def _recorded(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a replay of a call as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call among many."""
    seconds = []
    run()
    for _ in range(_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(_CALLS):
            run()
        _wait(device)
        seconds.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def launch_times(device: torch.device) -> dict[str, float]:
    """Return microseconds of a small kernel: enqueued by the host, and one of many in a CUDA graph."""
    numbers, count = torch.zeros(256, device=device), 500

    def many() -> torch.Tensor:
        for _ in range(count):
            numbers.add_(1.0)
        return numbers

    found = {"alone_us": 1e6 * _seconds(many, device) / count}
    if device.type != "cpu":
        found["in_graph_us"] = 1e6 * _seconds(_recorded(many), device) / count
    return found
