"""Comparison of an exported graph with its checkpoint: the certificate of a bundle.

Each case is a script of extends. PyTorch computes it by whole sequences without a cache, the graph through its
cache: padding, raggedness and rollback must not change logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle import manifest as bundle
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.reference import LogitsOfSequences, Reference
from outrider.export.checkpoint import ModelFacts
from transformers import PreTrainedModel

# Float32 exports were measured below 5e-7; a wrong position or mask moves logits by > 1e-2.
FLOAT32_TOLERANCE = 1e-4
# Logits up to this are judged by that number as it is, larger ones in proportion: so their rounding grows. T5 scales
# neither scores nor logits; of such a model PyTorch itself is 1.6e-4 from float64 at logits of 25.
_PLAIN_LOGITS = 10.0
_BATCH, _PREFILL, _NUM_EXTRA = 3, 12, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Worst difference of one case, and the number of greedy choices that agreed."""

    max_difference: float
    num_greedy_equal: int
    num_compared: int


def check_parity(
    model: PreTrainedModel | Reference,
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
    reference = model if isinstance(model, Reference) else Reference(model)
    return _check_cases(reference, path, facts, max_gamma=max_gamma, tolerance=tolerance, seed=seed)


def float32_tolerance(reference: Reference, facts: ModelFacts, *, max_gamma: int) -> float:
    """Return how far from the model a float32 graph may be, by the model's greatest logit in a certificate."""
    logits = reference.logits(certified_prompts(facts, max_gamma))
    return FLOAT32_TOLERANCE * max(1.0, float(np.abs(logits).max()) / _PLAIN_LOGITS)


def check_rounding(
    path: Path, facts: ModelFacts, *, max_gamma: int, tolerance: float | None, seed: int = 0
) -> Mapping[str, object]:
    """Return what the graph for accelerators loses in 16 bits of ``path``, the canonical graph with integer weights.

    That graph in float32 is the reference: both have the same integers. All else is as for ``check_parity``.

    Raises:
        BundleError: as ``check_parity``.
    """
    return _check_cases(
        _GraphReference(path, facts, certified_prompts(facts, max_gamma, seed).shape),
        path.with_name(bundle.DEVICE_FILE),
        facts,
        max_gamma=max_gamma,
        tolerance=tolerance,
        seed=seed,
    )


class _GraphReference:
    """Logits of sequences no larger than a shape, by a graph with integer weights, in float32."""

    def __init__(self, path: Path, facts: ModelFacts, shape: tuple[int, ...]) -> None:
        batch, capacity = shape
        self._runner = GraphRunner(path, facts, batch=batch, capacity=capacity, exact_blocks=True)

    def logits(self, sequences: IntArray) -> FloatArray:
        return self._runner.extend(sequences, np.zeros(len(sequences), np.int64))


def _check_cases(
    reference: LogitsOfSequences,
    path: Path,
    facts: ModelFacts,
    *,
    max_gamma: int,
    tolerance: float | None,
    seed: int,
) -> Mapping[str, object]:
    certificate: dict[str, object] = {"tolerance": tolerance, "seed": seed}
    rows, length = certified_prompts(facts, max_gamma, seed).shape
    runner = GraphRunner(path, facts, batch=rows, capacity=length + _NUM_EXTRA)
    for name, script in parity_scripts(facts, max_gamma, seed).items():
        runner.forget()
        results = [one for step in script if (one := step.compare(runner, reference)) is not None]
        certificate[name] = judged(name, results, path, tolerance)
    return certificate


def prepare_parity(
    reference: Reference, facts: ModelFacts, *, max_gamma: int, seed: int = 0
) -> None:
    """Compute all that ``check_parity`` asks of a reference, and logits of whole prompts."""
    reference.logits(certified_prompts(facts, max_gamma, seed))
    for script in parity_scripts(facts, max_gamma, seed).values():
        for step in script:
            if step.is_compared:
                step.expected(reference)


def judged(
    name: str, results: list[CaseResult], path: Path, tolerance: float | None
) -> Mapping[str, object]:
    """Return a case's entry in the certificate.

    Raises:
        BundleError: the case lies beyond the tolerance, or is not a number.
    """
    result = _merge(results)
    where = f"{path.parent.name}/{path.name}: parity case {name}"
    if not np.isfinite(result.max_difference):
        raise BundleError(f"{where} is not a number")
    if tolerance is not None and result.max_difference > tolerance:
        raise BundleError(
            f"{where} differs by {result.max_difference:.3g}, allowed {tolerance:.3g}"
        )
    return {
        "max_difference": result.max_difference,
        "num_greedy_equal": result.num_greedy_equal,
        "num_compared": result.num_compared,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extend:
    """One extend of every row, by ``num_tokens`` of its sequence [n] from ``start`` on."""

    sequences: IntArray
    start: IntArray
    num_tokens: int
    is_compared: bool = True

    def compare(self, runner: GraphRunner, reference: LogitsOfSequences) -> CaseResult | None:
        """Run the extend; return how far its logits are, if they are compared."""
        spans = np.take_along_axis(self.sequences, self._columns(), axis=1)
        answered = runner.extend(spans, self.start)
        return compare_logits(answered, self.expected(reference)) if self.is_compared else None

    def expected(self, reference: LogitsOfSequences) -> FloatArray:
        """Return the reference's logits [B, num_tokens, V]."""
        columns = self._columns()
        whole = reference.logits(self.sequences[:, : int(columns.max()) + 1])
        return np.take_along_axis(whole, columns[:, :, None], axis=1)

    def _columns(self) -> IntArray:
        return self.start[:, None] + np.arange(self.num_tokens)


def certified_prompts(facts: ModelFacts, max_gamma: int, seed: int = 0) -> IntArray:
    """Return the sequences [B, n] int64 that all cases take their tokens from."""
    generator = np.random.default_rng(seed)
    length = _PREFILL + max_gamma + 1 + _NUM_EXTRA
    return generator.integers(0, facts.vocab_size, (_BATCH, length), dtype=np.int64)


def parity_scripts(facts: ModelFacts, max_gamma: int, seed: int) -> dict[str, list[_Extend]]:
    """Return the extends of every case, each over a fresh cache."""
    prompts = certified_prompts(facts, max_gamma, seed)
    return {
        "prefill": [_extend(prompts, 0, _PREFILL)],
        "single_token": _continue(prompts, 1),
        "verify": _continue(prompts, max_gamma + 1),
        "ragged": _ragged(prompts),
        "rollback": _rollback(prompts, max_gamma + 1),
    }


def compare_logits(answered: FloatArray, expected: FloatArray) -> CaseResult:
    """Return the worst difference (infinite where not a number) and the greedy agreement of [B, T, V] logits."""
    worst = float(np.abs(answered - expected).max())
    is_equal: npt.NDArray[Any] = answered.argmax(-1) == expected.argmax(-1)
    return CaseResult(
        max_difference=worst if np.isfinite(worst) else float("inf"),
        num_greedy_equal=int(is_equal.sum()),
        num_compared=is_equal.size,
    )


def _extend(sequences: IntArray, start: int, num_tokens: int) -> _Extend:
    starts = np.full(len(sequences), start, np.int64)
    return _Extend(sequences=sequences, start=starts, num_tokens=num_tokens)


def _continue(prompts: IntArray, num_tokens: int) -> list[_Extend]:
    return [_extend(prompts, 0, _PREFILL), _extend(prompts, _PREFILL, num_tokens)]


def _ragged(prompts: IntArray) -> list[_Extend]:
    """Compare rows of different lengths; the first prefill leaves padding beyond each row's end."""
    lengths = _PREFILL - 2 * np.arange(len(prompts), dtype=np.int64)
    least = int(lengths.min())
    return [
        replace(_extend(prompts[:, ::-1].copy(), 0, _PREFILL), is_compared=False),
        _extend(prompts, 0, least),
        _extend(prompts, least, _PREFILL - least),
        _Extend(sequences=prompts, start=lengths, num_tokens=4),
    ]


def _rollback(prompts: IntArray, num_tokens: int) -> list[_Extend]:
    """Write a span, truncate each row at another place, write other tokens and compare."""
    kept = _PREFILL + np.arange(len(prompts), dtype=np.int64) % num_tokens
    others = prompts.copy()
    for row, start in enumerate(kept):
        others[row, start:] = prompts[row, start:][::-1]
    rewritten = _Extend(sequences=others, start=kept, num_tokens=num_tokens)
    return [*_continue(prompts, num_tokens), rewritten]


def _merge(results: list[CaseResult]) -> CaseResult:
    return CaseResult(
        max_difference=max(result.max_difference for result in results),
        num_greedy_equal=sum(result.num_greedy_equal for result in results),
        num_compared=sum(result.num_compared for result in results),
    )
