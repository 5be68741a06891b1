"""A histogram whose observations have weights, which ``prometheus_client`` has none of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Counts values by size; written by one thread, collected by any.

    Args:
        name: of the metric.
        text: what it says in words.
        bounds: upper bounds of the buckets, ascending, without the last one, which takes all else.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the one metric."""
        yield family(self._name, self._text, self._bounds, self._counts, self._sum)


def family(
    name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """Return a histogram by what each bucket alone has counted; without any ``counts`` an empty one."""
    names = [*map(repr, map(float, bounds)), "+Inf"]
    buckets = zip(names, accumulate(counts or [0] * len(names)), strict=True)
    return HistogramMetricFamily(name, text, buckets=[*buckets], sum_value=total)
