"""Comparison of an exported graph with its checkpoint: the certificate of a bundle.

PyTorch computes each case (``parity_cases``) by whole sequences without a cache, the graph through its cache: padding,
raggedness, rollback and who had a row before must not change logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from outrider.export.certificate.reference import Logits, LogitsOfSequences, LongText, Reference
from outrider.export.certificate.window_cases import start_behind, window_cases
from outrider.export.model_config import ModelConfig
from outrider.export.progress import Steps, untold
from transformers import PreTrainedModel

# A right float32 graph lies within 3 roundings of PyTorch, the subtlest mistake at 34 (docs/measurements.md).
_MOST_ROUNDINGS = 6.0


_TRY = (
    "a graph as far computes something else: try another release of Transformers, report the model, or take it as it "
    "is with --accept-parity"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far from the checkpoint's logits a graph's may be, and why no farther.

    Attributes:
        value: over a certificate's prompts.
        why: in words.
        rounding: what PyTorch's float32 rounds away over the same prompts.
        accepted: what a user accepts on any sequence.
    """

    value: float
    why: str
    rounding: float = 0.0
    accepted: float = 0.0

    def of(self, rounding: float) -> float:
        """Return what is allowed where PyTorch's float32 rounds away so much: in proportion, or what is accepted."""
        more = max(1.0, rounding / self.rounding) if self.rounding else 1.0
        return max(self.value * more, self.accepted)

    def accepting(self, value: float | None) -> Bound:
        """Return the bound, or one that allows as much as a user accepts, and on no sequence more than either."""
        if value is None or value <= self.value:
            return self
        why = f"accepted; without --accept-parity {self.value:.3g}, {self.why}"
        return replace(self, why=why, accepted=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Worst difference of one case, and its greedy choices.

    Attributes:
        lost_lead: the most that a choice of the graph's lies below the reference's own, in the reference's logits.
        references: what PyTorch answers to the case's sequences.
    """

    max_difference: float
    num_greedy_equal: int
    num_compared: int
    lost_lead: float = 0.0
    references: Sequence[Logits] = ()

    def allowed(self, bound: Bound) -> float:
        """Return what a bound allows: more than on any sequence only where PyTorch rounds away more, if that counts."""
        least = bound.of(0.0)
        if max(self.max_difference, self.lost_lead) <= least:
            return least
        return bound.of(max((one.rounding for one in self.references), default=0.0))


def _nothing() -> None: ...


def check_parity(
    model: PreTrainedModel | Reference,
    path: Path,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    bound: Bound | None,
    seed: int = 0,
    exact_blocks: bool = False,
    compared: Callable[[], None] = _nothing,
) -> Mapping[str, object]:
    """Return the certificate of a graph: per case the worst logit difference and the greedy agreement.

    The model is the reference. A verification's span is max_gamma + 1 tokens. Without a bound differences
    are recorded and not judged, as for quantised weights. With ``exact_blocks`` products with blocks of integers are
    float32, else as they are served. ``compared`` is called after each case.

    Raises:
        BundleError: a case lies beyond the bound, or is not a number.
    """
    reference = model if isinstance(model, Reference) else Reference(model)
    return _check_cases(
        reference,
        path,
        model_config,
        max_gamma=max_gamma,
        bound=bound,
        seed=seed,
        exact_blocks=exact_blocks,
        compared=compared,
    )


def float32_bound(
    reference: Reference,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    accepted: float | None = None,
) -> Bound:
    """Return how far from the model a float32 graph may be, by what the model's own float32 rounds away.

    Where a user accepts more, that.

    Raises:
        BundleError: the model's logits are not numbers.
    """
    prompts, sources = certified_prompts(model_config, max_gamma), certified_sources(model_config)
    return bound_by_rounding(reference, prompts, sources).accepting(accepted)


def bound_by_rounding(
    reference: Reference, sequences: IntArray, sources: Sources | None = None
) -> Bound:
    """Return how far a float32 graph's logits of whole sequences [B, n] int64 may be from the model's.

    Raises:
        BundleError: the model's logits are not numbers.
    """
    rounding = reference.logits(sequences, sources).rounding
    if not np.isfinite(rounding):
        raise BundleError("PyTorch's own logits of this checkpoint are not numbers")
    why = f"{_MOST_ROUNDINGS:.0f} times what PyTorch's float32 is from its float64, {rounding:.2g}"
    return Bound(value=_MOST_ROUNDINGS * rounding, why=why, rounding=rounding)


def check_rounding(
    path: Path, model_config: ModelConfig, *, max_gamma: int, bound: Bound | None, seed: int = 0
) -> Mapping[str, object]:
    """Return what the graph for accelerators loses in 16 bits of ``path``, the canonical graph with integer weights.

    That graph in float32 is the reference: both have the same integers. All else is as for ``check_parity``.

    Raises:
        BundleError: as ``check_parity``.
    """
    return _check_cases(
        _GraphReference(path, model_config, max_gamma, seed),
        path.with_name(names.DEVICE_FILE),
        model_config,
        max_gamma=max_gamma,
        bound=bound,
        seed=seed,
    )


class _GraphReference:
    """Logits of a certificate's sequences by a graph with integer weights, in float32."""

    def __init__(self, path: Path, model_config: ModelConfig, max_gamma: int, seed: int) -> None:
        self._runner = GraphRunner(
            path,
            model_config,
            batch=len(certified_prompts(model_config, max_gamma, seed)),
            capacity=most_columns(model_config, max_gamma),
            source_capacity=most_source_columns(model_config),
            exact_blocks=True,
        )

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> Logits:
        self._runner.forget()
        self._runner.read(sources)
        return Logits(values=self._runner.extend(sequences, np.zeros(len(sequences), np.int64)))

    def behind(self, text: LongText, tokens: IntArray) -> Logits:
        start_behind(self._runner, text, tokens.shape[1])
        return Logits(values=self._runner.extend(tokens, np.array([text.past], np.int64)))


def _check_cases(
    reference: LogitsOfSequences,
    path: Path,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    bound: Bound | None,
    seed: int,
    exact_blocks: bool = False,
    compared: Callable[[], None] = _nothing,
) -> Mapping[str, object]:
    certificate: dict[str, object] = {"tolerance": bound and bound.of(0.0), "seed": seed}
    rows = len(certified_prompts(model_config, max_gamma, seed))
    runner = GraphRunner(
        path,
        model_config,
        batch=rows,
        capacity=most_columns(model_config, max_gamma),
        source_capacity=most_source_columns(model_config),
        exact_blocks=exact_blocks,
    )
    for name, case in parity_cases(model_config, max_gamma, seed).items():
        results = [
            compare_logits(logits, extend.expected(reference, case.sources))
            for extend, logits in case.run(runner)
        ]
        for part, count in {**case.beginnings, name: len(results)}.items():
            certificate[part] = judged(part, results[:count], path, bound)
        compared()
    for name, beyond in window_cases(model_config, max_gamma, seed).items():
        found = compare_logits(beyond.run(runner), beyond.expected(reference))
        certificate[name] = judged(name, [found], path, bound)
    return certificate


def prepare_parity(
    reference: Reference,
    model_config: ModelConfig,
    *,
    max_gamma: int,
    seed: int = 0,
    report: Steps = untold,
) -> None:
    """Compute all that ``check_parity`` asks of a reference, and logits of whole prompts.

    ``report`` is told of the cases that are computed.
    """
    reference.logits(
        certified_prompts(model_config, max_gamma, seed), certified_sources(model_config, seed)
    )
    cases = parity_cases(model_config, max_gamma, seed)
    for index, case in enumerate(cases.values(), start=1):
        for extend in case.extends:
            if extend.is_compared:
                extend.expected(reference, case.sources)
        report(index, len(cases))
    for beyond in window_cases(model_config, max_gamma, seed).values():
        beyond.expected(reference)


def judged(
    name: str, results: list[CaseResult], path: Path, bound: Bound | None
) -> Mapping[str, object]:
    """Return a case's entry in the certificate.

    Raises:
        BundleError: the case lies beyond the tolerance, or is not a number.
    """
    result = _merge(results)
    where = f"{path.parent.name}/{path.name}: parity case {name}"
    if not np.isfinite(result.max_difference):
        raise BundleError(f"{where} is not a number")
    if bound is not None:
        allowed = result.allowed(bound)
        reason = f"allowed {allowed:.3g}: {bound.why}; {_TRY}"
        if result.max_difference > allowed:
            raise BundleError(f"{where} differs by {result.max_difference:.3g}, {reason}")
        if result.lost_lead > allowed:
            raise BundleError(
                f"{where} takes a token {result.lost_lead:.3g} below the likeliest, {reason}"
            )
    return {
        "max_difference": result.max_difference,
        "num_greedy_equal": result.num_greedy_equal,
        "num_compared": result.num_compared,
    }


def compare_logits(answered: FloatArray, reference: Logits) -> CaseResult:
    """Return the worst difference (infinite where not a number) and the greedy choices of [B, T, V] logits."""
    expected = reference.values
    worst = float(np.abs(answered - expected).max())
    chosen = answered.argmax(-1)
    is_equal: npt.NDArray[Any] = chosen == expected.argmax(-1)
    lost = expected.max(-1) - np.take_along_axis(expected, chosen[..., None], -1)[..., 0]
    return CaseResult(
        max_difference=worst if np.isfinite(worst) else float("inf"),
        num_greedy_equal=int(is_equal.sum()),
        num_compared=is_equal.size,
        lost_lead=float(lost.max()),
        references=(reference,),
    )


def _merge(results: list[CaseResult]) -> CaseResult:
    return CaseResult(
        max_difference=max(result.max_difference for result in results),
        num_greedy_equal=sum(result.num_greedy_equal for result in results),
        num_compared=sum(result.num_compared for result in results),
        lost_lead=max(result.lost_lead for result in results),
        references=[one for result in results for one in result.references],
    )
