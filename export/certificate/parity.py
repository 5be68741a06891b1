"""Comparison of an exported graph with its checkpoint: the certificate of a bundle.

PyTorch computes each case (``parity_cases``) by whole sequences without a cache, the graph through its cache: padding,
raggedness, rollback and who had a row before must not change logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.export.certificate.feeds import Sources
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity_cases import (
    certified_prompts,
    certified_sources,
    most_columns,
    most_source_columns,
    parity_cases,
)
from outrider.export.certificate.reference import LogitsOfSequences, LongText, Reference
from outrider.export.certificate.window_cases import start_behind, window_case
from outrider.export.facts import ModelFacts
from outrider.export.progress import Steps, untold
from transformers import PreTrainedModel

# Float32 exports were measured below 5e-7; a wrong position or mask moves logits by > 1e-2.
FLOAT32_TOLERANCE = 1e-4
# Of models with an encoder: logits up to this are judged by that number as it is, larger ones in proportion, as their
# rounding grows. T5 scales neither scores nor logits; of such a model PyTorch itself is 1.6e-4 from float64 at 25.
_PLAIN_LOGITS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Worst difference of one case, and the number of greedy choices that agreed."""

    max_difference: float
    num_greedy_equal: int
    num_compared: int


def _nothing() -> None: ...


def check_parity(
    model: PreTrainedModel | Reference,
    path: Path,
    facts: ModelFacts,
    *,
    max_gamma: int,
    tolerance: float | None = FLOAT32_TOLERANCE,
    seed: int = 0,
    exact_blocks: bool = False,
    compared: Callable[[], None] = _nothing,
) -> Mapping[str, object]:
    """Return the certificate of a graph: per case the worst logit difference and the greedy agreement.

    The model is the reference. A verification's span is max_gamma + 1 tokens. Without a tolerance differences
    are recorded and not judged, as for quantised weights. With ``exact_blocks`` products with blocks of integers are
    float32, else as they are served. ``compared`` is called after each case.

    Raises:
        BundleError: a case lies beyond the tolerance, or is not a number.
    """
    reference = model if isinstance(model, Reference) else Reference(model)
    return _check_cases(
        reference,
        path,
        facts,
        max_gamma=max_gamma,
        tolerance=tolerance,
        seed=seed,
        exact_blocks=exact_blocks,
        compared=compared,
    )


def float32_tolerance(reference: Reference, facts: ModelFacts, *, max_gamma: int) -> float:
    """Return how far from the model a float32 graph may be.

    With an encoder that goes by the logits of likeliest tokens in a certificate: a bias that keeps others from being
    drawn says nothing of rounding.
    """
    if facts.source is None:
        return FLOAT32_TOLERANCE
    prompts, sources = certified_prompts(facts, max_gamma), certified_sources(facts)
    likeliest = reference.logits(prompts, sources).max(-1)
    return FLOAT32_TOLERANCE * max(1.0, float(np.abs(likeliest).max()) / _PLAIN_LOGITS)


def check_rounding(
    path: Path, facts: ModelFacts, *, max_gamma: int, tolerance: float | None, seed: int = 0
) -> Mapping[str, object]:
    """Return what the graph for accelerators loses in 16 bits of ``path``, the canonical graph with integer weights.

    That graph in float32 is the reference: both have the same integers. All else is as for ``check_parity``.

    Raises:
        BundleError: as ``check_parity``.
    """
    return _check_cases(
        _GraphReference(path, facts, max_gamma, seed),
        path.with_name(names.DEVICE_FILE),
        facts,
        max_gamma=max_gamma,
        tolerance=tolerance,
        seed=seed,
    )


class _GraphReference:
    """Logits of a certificate's sequences by a graph with integer weights, in float32."""

    def __init__(self, path: Path, facts: ModelFacts, max_gamma: int, seed: int) -> None:
        self._runner = GraphRunner(
            path,
            facts,
            batch=len(certified_prompts(facts, max_gamma, seed)),
            capacity=most_columns(facts, max_gamma),
            source_capacity=most_source_columns(facts),
            exact_blocks=True,
        )

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> FloatArray:
        self._runner.forget()
        self._runner.read(sources)
        return self._runner.extend(sequences, np.zeros(len(sequences), np.int64))

    def behind(self, text: LongText, tokens: IntArray) -> FloatArray:
        start_behind(self._runner, text, tokens.shape[1])
        return self._runner.extend(tokens, np.array([text.past], np.int64))


def _check_cases(
    reference: LogitsOfSequences,
    path: Path,
    facts: ModelFacts,
    *,
    max_gamma: int,
    tolerance: float | None,
    seed: int,
    exact_blocks: bool = False,
    compared: Callable[[], None] = _nothing,
) -> Mapping[str, object]:
    certificate: dict[str, object] = {"tolerance": tolerance, "seed": seed}
    rows = len(certified_prompts(facts, max_gamma, seed))
    runner = GraphRunner(
        path,
        facts,
        batch=rows,
        capacity=most_columns(facts, max_gamma),
        source_capacity=most_source_columns(facts),
        exact_blocks=exact_blocks,
    )
    for name, case in parity_cases(facts, max_gamma, seed).items():
        results = [
            compare_logits(logits, extend.expected(reference, case.sources))
            for extend, logits in case.run(runner)
        ]
        certificate[name] = judged(name, results, path, tolerance)
        compared()
    if (beyond := window_case(facts, max_gamma, seed)) is not None:
        found = compare_logits(beyond.run(runner), beyond.expected(reference))
        certificate["window"] = judged("window", [found], path, tolerance)
    return certificate


def prepare_parity(
    reference: Reference,
    facts: ModelFacts,
    *,
    max_gamma: int,
    seed: int = 0,
    report: Steps = untold,
) -> None:
    """Compute all that ``check_parity`` asks of a reference, and logits of whole prompts.

    ``report`` is told of the cases that are computed.
    """
    reference.logits(certified_prompts(facts, max_gamma, seed), certified_sources(facts, seed))
    cases = parity_cases(facts, max_gamma, seed)
    for index, case in enumerate(cases.values(), start=1):
        for extend in case.extends:
            if extend.is_compared:
                extend.expected(reference, case.sources)
        report(index, len(cases))
    if (beyond := window_case(facts, max_gamma, seed)) is not None:
        beyond.expected(reference)


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


def compare_logits(answered: FloatArray, expected: FloatArray) -> CaseResult:
    """Return the worst difference (infinite where not a number) and the greedy agreement of [B, T, V] logits."""
    worst = float(np.abs(answered - expected).max())
    is_equal: npt.NDArray[Any] = answered.argmax(-1) == expected.argmax(-1)
    return CaseResult(
        max_difference=worst if np.isfinite(worst) else float("inf"),
        num_greedy_equal=int(is_equal.sum()),
        num_compared=is_equal.size,
    )


def _merge(results: list[CaseResult]) -> CaseResult:
    return CaseResult(
        max_difference=max(result.max_difference for result in results),
        num_greedy_equal=sum(result.num_greedy_equal for result in results),
        num_compared=sum(result.num_compared for result in results),
    )
