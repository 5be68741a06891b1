"""Results of an analysis as plain values, for tables, figures and JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaRow:
    """Mean acceptance of one drafter over text that the target wrote, every position counted.

    Attributes:
        alpha: mean over all positions of the probability that the target keeps the first draft
            token; 0 where nothing is drafted.
        coverage: share of positions at which something is drafted.
        rejection: mean of the probability that plain rejection sampling keeps that token, appendix A.2.
        most_tokens: tokens per target pass that no choice of gamma exceeds, section 3.5; None without a bound.
        lenient: lenience -> the same as alpha under appendix A.5.
    """

    drafter: str
    temperature: float
    alpha: float
    coverage: float
    num_positions: int
    rejection: float
    most_tokens: float | None
    lenient: dict[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Step times at one temperature; all but ``plain_ms`` in units of the plain step.

    Attributes:
        plain_ms: milliseconds of the runtime's plain step, sampling and host work included.
        draft_cost: drafter -> c, one draft token.
        verify_cost: k -> v(k), one step whose target pass takes k tokens per row.
        target_ms: k -> milliseconds of that target pass alone.
    """

    temperature: float
    plain_ms: float
    draft_cost: dict[str, float]
    verify_cost: dict[int, float]
    target_ms: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One setting measured against plain decoding, beside the formula's prediction.

    Attributes:
        alpha: in the formula: of the ``AlphaRow``, or ``alpha_hat`` where there is none (trees, phrases and cascades
            have no distribution of a single draft token).
        draft_cost: c.
        verify_cost: v(gamma + 1).
        paper: Theorem 3.8 as printed, at v = 1; None without alpha.
        predicted: the same with the measured v; None without alpha.
        best_gamma: gamma of the greatest predicted factor, up to the bundle's cap.
        alpha_hat: accepted / trials reached, in this run; None without trials.
        operations: tokens that the target computed per token emitted.
        alpha_by_place: like it, of the first draft tokens, the second ones, and so on.
        speedup: over plain decoding, median of the rounds' ratios.
        interval: of the speed-up, with 95 % confidence; None for too few rounds.
    """

    drafter: str
    temperature: float
    gamma: int
    alpha: float | None
    draft_cost: float
    verify_cost: float
    paper: float | None
    predicted: float | None
    best_gamma: int | None
    alpha_hat: float | None
    tokens_per_step: float
    operations: float
    tokens_per_s: float
    speedup: float
    interval: tuple[float, float] | None = None
    alpha_by_place: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """When the models ran during one request; milliseconds from its first call.

    Attributes:
        gamma: 0 is plain decoding.
        target_ms: begin and end of each target pass.
        draft_ms: begin and end of each call of the draft model.
    """

    label: str
    gamma: int
    target_ms: tuple[tuple[float, float], ...]
    draft_ms: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Results of one run of ``outrider analyze``.

    Attributes:
        folder: of the bundle, as it was given; ``bundle`` is its name.
        seconds: "wall" or "processor".
        plain_tokens_per_s: temperature -> plain decoding.
        has_head: whether the draft is a head.
    """

    bundle: str
    folder: str
    device: str
    weights: str
    num_prompts: int
    max_tokens: int
    batch: int
    rounds: int
    seconds: str
    alphas: tuple[AlphaRow, ...]
    costs: tuple[CostRow, ...]
    speeds: tuple[SpeedRow, ...]
    plain_tokens_per_s: dict[float, float]
    traces: tuple[TraceRow, ...]
    has_head: bool = False
