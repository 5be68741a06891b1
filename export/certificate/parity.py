"""Comparison of an exported graph with its checkpoint: the certificate of a bundle.

Each case is a script of extends. PyTorch computes it by whole sequences without a cache, the graph through its
cache: padding, raggedness and rollback must not change logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle import manifest as bundle
from outrider.engines.onnx.packed_inputs import PackedGraph, packed_feeds
from outrider.engines.onnx.session import open_session
from outrider.export.checkpoint import ModelFacts
from transformers import PreTrainedModel

# Float32 exports were measured below 5e-7; a wrong position or mask moves logits by > 1e-2.
FLOAT32_TOLERANCE = 1e-4
_BATCH, _PREFILL, _NUM_EXTRA = 3, 12, 24
# By ONNX Runtime's names.
_CACHE_TYPES: Mapping[str, npt.DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Worst difference of one case, and the number of greedy choices that agreed."""

    max_difference: float
    num_greedy_equal: int
    num_compared: int


class GraphRunner:
    """A canonical graph on ONNX Runtime with caches held as arrays; for checks, not for serving.

    Attributes:
        caches: [B, H, S, D] by name, as after the last run.
    """

    def __init__(self, path: Path, facts: ModelFacts, *, batch: int, capacity: int) -> None:
        self._session = open_session(path, copies_caches=True)
        inputs = self._session.get_inputs()
        self._packed = PackedGraph.of(
            {tensor.name: tensor.shape for tensor in inputs},
            num_kv_heads=facts.num_kv_heads,
            last=facts.max_position - 1,
        )
        self._capacity = capacity
        self._takes_lengths = any(tensor.name == bundle.LENGTHS for tensor in inputs)
        kinds = {tensor.name: tensor.type for tensor in inputs}
        kind = _CACHE_TYPES[kinds[bundle.key_name(0)]]
        self.caches = used_caches(facts, batch, capacity, kind=kind)

    def extend(self, tokens: IntArray, start: IntArray) -> FloatArray:
        """Return logits [B, T, V] of a span [B, T] int64 written from ``start`` [B] int64 on."""
        feeds: Feeds
        if self._packed is None:
            feeds = self.span_feeds(tokens, start)
        else:
            feeds = packed_feeds(self._packed, tokens, start, capacity=self._capacity)
        return self.run(self._session, feeds).reshape(*tokens.shape, -1)

    def span_feeds(self, tokens: IntArray, start: IntArray) -> dict[str, npt.NDArray[Any]]:
        """Return inputs of this graph and its tree's for a span; see the function of this name."""
        lengths = {bundle.LENGTHS: start + tokens.shape[1]} if self._takes_lengths else {}
        return span_feeds(tokens, start) | lengths

    def run(self, session: Any, feeds: Feeds) -> FloatArray:
        """Return the logits of a session of ONNX Runtime over the caches, which it replaces."""
        logits: FloatArray
        logits, *caches = session.run(None, {**feeds, **self.caches})
        self.caches = dict(zip(self.caches, caches, strict=True))
        return logits


def used_caches(
    facts: ModelFacts, batch: int, capacity: int, *, kind: npt.DTypeLike = np.float32
) -> dict[str, FloatArray]:
    """Return caches [B, H, S, D] by name, keys first.

    They hold no zeros: a graph must not see what lies beyond a row's length.
    """
    shape = (batch, facts.num_kv_heads, capacity, facts.head_size)
    layers = range(facts.num_layers)
    names = (*map(bundle.key_name, layers), *map(bundle.value_name, layers))
    return {name: np.full(shape, 7.0, kind) for name in names}


def span_feeds(tokens: IntArray, start: IntArray) -> dict[str, npt.NDArray[Any]]:
    """Return inputs for a span [B, T] int64 behind ``start`` [B] int64, all of whose logits are wanted."""
    columns = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.int64)
    return {bundle.TOKENS: tokens, bundle.START: start, bundle.LOGIT_POSITIONS: columns}


def check_parity(
    model: PreTrainedModel,
    path: Path,
    facts: ModelFacts,
    *,
    max_gamma: int,
    tolerance: float | None = FLOAT32_TOLERANCE,
    seed: int = 0,
) -> Mapping[str, object]:
    """Return the certificate of a graph: per case the worst logit difference and the greedy agreement.

    The model is the reference. A verification's span is max_gamma + 1 tokens. Without a tolerance differences
    are recorded and not judged, as for quantised weights.

    Raises:
        BundleError: a case lies beyond the tolerance, or is not a number.
    """
    generator = np.random.default_rng(seed)
    length = _PREFILL + max_gamma + 1 + _NUM_EXTRA
    prompts = generator.integers(0, facts.vocab_size, (_BATCH, length), dtype=np.int64)
    cases: dict[str, Callable[[_Trial], list[CaseResult]]] = {
        "prefill": _prefill,
        "single_token": lambda trial: _continue(trial, 1),
        "verify": lambda trial: _continue(trial, max_gamma + 1),
        "ragged": _ragged,
        "rollback": lambda trial: _rollback(trial, max_gamma + 1),
    }
    certificate: dict[str, object] = {"tolerance": tolerance, "seed": seed}
    for name, case in cases.items():
        trial = _Trial(model, path, facts, prompts)
        certificate[name] = judged(name, case(trial), path, tolerance)
    return certificate


def judged(
    name: str, results: list[CaseResult], path: Path, tolerance: float | None
) -> Mapping[str, object]:
    """Return a case's entry in the certificate.

    Raises:
        BundleError: the case lies beyond the tolerance, or is not a number.
    """
    result = _merge(results)
    if tolerance is not None and not result.max_difference <= tolerance:
        raise BundleError(
            f"{path.parent.name}/{path.name}: parity case {name} differs by "
            f"{result.max_difference:.3g}, allowed {tolerance:.3g}; the bundle is not written"
        )
    return {
        "max_difference": result.max_difference,
        "num_greedy_equal": result.num_greedy_equal,
        "num_compared": result.num_compared,
    }


class _Trial:
    """A fresh cache, and the reference to compare with."""

    def __init__(
        self, model: PreTrainedModel, path: Path, facts: ModelFacts, prompts: IntArray
    ) -> None:
        self.model = model
        self.prompts = prompts
        capacity = prompts.shape[1] + _NUM_EXTRA
        self.runner = GraphRunner(path, facts, batch=len(prompts), capacity=capacity)

    def compare(self, sequences: IntArray, start: IntArray, num_tokens: int) -> CaseResult:
        """Extend every row by ``num_tokens`` of its sequence from ``start`` and compare."""
        columns = start[:, None] + np.arange(num_tokens)
        spans = np.take_along_axis(sequences, columns, axis=1)
        answered = self.runner.extend(spans, start)
        whole = reference_logits(self.model, sequences[:, : int(columns.max()) + 1])
        expected = np.take_along_axis(whole, columns[:, :, None], axis=1)
        return compare_logits(answered, expected)


def reference_logits(model: PreTrainedModel, sequences: IntArray) -> FloatArray:
    """Return PyTorch's logits [B, n, V] float32 of whole sequences [B, n] int64, without a cache."""
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(np.ascontiguousarray(sequences)), use_cache=False)
    logits: FloatArray = output.logits.float().numpy()
    return logits


def compare_logits(answered: FloatArray, expected: FloatArray) -> CaseResult:
    """Return the worst difference (infinite where not a number) and the greedy agreement of [B, T, V] logits."""
    worst = float(np.abs(answered - expected).max())
    is_equal: npt.NDArray[Any] = answered.argmax(-1) == expected.argmax(-1)
    return CaseResult(
        max_difference=worst if np.isfinite(worst) else float("inf"),
        num_greedy_equal=int(is_equal.sum()),
        num_compared=is_equal.size,
    )


def _prefill(trial: _Trial) -> list[CaseResult]:
    return [trial.compare(trial.prompts, _starts(trial, 0), _PREFILL)]


def _continue(trial: _Trial, num_tokens: int) -> list[CaseResult]:
    first = trial.compare(trial.prompts, _starts(trial, 0), _PREFILL)
    second = trial.compare(trial.prompts, _starts(trial, _PREFILL), num_tokens)
    return [first, second]


def _ragged(trial: _Trial) -> list[CaseResult]:
    """Compare rows of different lengths; the first prefill leaves padding beyond each row's end."""
    lengths = _PREFILL - 2 * np.arange(len(trial.prompts), dtype=np.int64)
    trial.runner.extend(trial.prompts[:, ::-1][:, :_PREFILL].copy(), _starts(trial, 0))
    first = trial.compare(trial.prompts, _starts(trial, 0), int(lengths.min()))
    starts = _starts(trial, int(lengths.min()))
    second = trial.compare(trial.prompts, starts, _PREFILL - int(lengths.min()))
    return [first, second, trial.compare(trial.prompts, lengths, 4)]


def _rollback(trial: _Trial, num_tokens: int) -> list[CaseResult]:
    """Write a span, truncate each row at another place, write other tokens and compare."""
    results = _continue(trial, num_tokens)
    kept = _PREFILL + np.arange(len(trial.prompts), dtype=np.int64) % num_tokens
    others = trial.prompts.copy()
    for row, start in enumerate(kept):
        others[row, start:] = trial.prompts[row, start:][::-1]
    return [*results, trial.compare(others, kept, num_tokens)]


def _starts(trial: _Trial, start: int) -> IntArray:
    return np.full(len(trial.prompts), start, np.int64)


def _merge(results: list[CaseResult]) -> CaseResult:
    return CaseResult(
        max_difference=max(result.max_difference for result in results),
        num_greedy_equal=sum(result.num_greedy_equal for result in results),
        num_compared=sum(result.num_compared for result in results),
    )
