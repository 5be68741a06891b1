"""Prometheus metrics of what a worker counts, from one snapshot per scrape: it may be in another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.runtime.core.stats import ControlReport
from outrider.runtime.loop.totals import READ_BUCKETS_S, STEP_BUCKETS_S, WorkerSnapshot
from outrider.runtime.serving.observability.histogram import family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What a scrape reads of a worker.

    Attributes:
        snapshot: where it stands.
        num_restarts: engines that another one has replaced.
        num_streams: open ones.
        max_context: tokens that a slot holds.
        has_sources: whether the model reads sources.
        has_prefixes: whether caches of prefixes are kept.
    """

    snapshot: Callable[[], WorkerSnapshot]
    num_restarts: Callable[[], int]
    num_streams: Callable[[], int]
    max_context: int
    has_sources: bool = False
    has_prefixes: bool = False


class WorkerMetrics(Collector):
    """Metrics of one worker."""

    def __init__(self, view: WorkerView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield its metrics as of now."""
        view, counts = self._view, self._view.snapshot()
        yield _gauge("num_requests_running", "Requests that hold a slot", counts.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for one", counts.num_queued)
        yield _gauge("queue_tokens", "Prompt tokens of those that wait", counts.num_queued_tokens)
        yield _gauge("streams", "Open streams", view.num_streams())
        yield _gauge("slots", "Slots", counts.num_slots)
        yield _gauge("slots_free", "Free slots", counts.num_free_slots)
        yield _gauge(
            "kv_cache_tokens", "Tokens that the slots hold for live requests", counts.num_kv_tokens
        )
        yield _gauge(
            "kv_cache_capacity_tokens",
            "Tokens that the slots have room for",
            counts.num_slots * view.max_context,
        )
        yield _counter("engine_steps", "Steps run", counts.step_count)
        yield _counter("engine_restarts", "Engines that another has replaced", view.num_restarts())
        yield family(
            "outrider_engine_step_seconds",
            "A step of all live requests",
            STEP_BUCKETS_S,
            counts.steps_by_s,
            counts.step_s,
        )
        yield from _control(counts.control)
        if view.has_sources:
            yield from _reads(counts)
        if view.has_prefixes:
            yield from _prefixes(counts)


def _control(report: ControlReport | None) -> Iterator[Metric]:
    """Yield what choosing gamma brought; gauges are NaN where a value is unknown."""
    for name, text in (
        ("speed_up", "Tokens per second over those of plain decoding, recently"),
        ("regret", "Share of the best fixed gamma's tokens per second missed, recently"),
        ("best_fixed_gamma", "The fixed gamma that would have been best, recently"),
        ("cost_share", "Share of the decoding time spent on choosing gamma"),
    ):
        value = getattr(report, name, None)
        yield _gauge(f"control_{name}", text, math.nan if value is None else float(value))
    verdicts = () if report is None else report.verdicts
    for name, text in (
        ("alpha", "Share of a drafter's tokens that was kept, recently"),
        ("least_alpha", "Share from which on a drafter is faster than plain decoding"),
    ):
        gauge = GaugeMetricFamily(f"outrider_control_{name}", text, labels=["drafter"])
        for one in verdicts:
            found = getattr(one, name)
            gauge.add_metric([one.drafter], math.nan if found is None else found)
        yield gauge
    for name, text, read in (
        ("steps_on", "Decoding steps with drafts", "num_steps_on"),
        ("steps_off", "Decoding steps without", "num_steps_off"),
        ("probes", "Steps without drafts that measured what drafts gain", "num_probes"),
    ):
        yield _counter(f"control_{name}", text, getattr(report, read, 0))


def _reads(counts: WorkerSnapshot) -> Iterator[Metric]:
    """Yield what the worker counts of sources."""
    yield _gauge(
        "num_requests_reading", "Requests whose source is not read yet", counts.num_reading
    )
    yield _counter("source_tokens", "Tokens of sources read", counts.num_source_tokens)
    yield family(
        "outrider_read_seconds",
        "A read of one source or several, which running streams wait for",
        READ_BUCKETS_S,
        counts.reads_by_s,
        counts.read_s,
    )


def _prefixes(counts: WorkerSnapshot) -> Iterator[Metric]:
    """Yield what the worker's cache of prefixes counts."""
    found = counts.prefixes
    yield _gauge("prefix_cache_bytes", "Memory of the cache of earlier texts", found.num_bytes)
    yield _counter("prefix_cache_queries", "Tokens of prompts looked for", found.num_queried)
    yield _counter("prefix_cache_hits", "Tokens of prompts not computed again", found.num_found)
    yield _counter(
        "prefix_cache_evictions", "Pieces of texts that others have replaced", found.num_evicted
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"outrider_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"outrider_{name}", text, value=value)
