"""Ratios of speeds from rounds that several ways ran in turns, so that a disturbance meets all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio of speeds with its 95 % interval."""

    ratio: float
    low: float
    high: float


def interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Ratio of two ways' speeds over the rounds that both ran: geometric mean and Student's interval."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    middle = statistics.fmean(logs)
    half = math.inf
    if len(logs) > 1:
        quantile = float(student.ppf((1.0 + CONFIDENCE) / 2.0, len(logs) - 1))
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(min(middle + half, 700.0)),
    )
