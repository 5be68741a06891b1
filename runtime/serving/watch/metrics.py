"""Prometheus metrics of a server, under vLLM's names where vLLM has the metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

from outrider.runtime.core.params import Finished, SpeculationReport
from outrider.runtime.core.stats import ControlReport
from outrider.runtime.loop.totals import READ_BUCKETS_S, WorkerSnapshot
from outrider.runtime.serving.outbox import Batch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Metrics:
    """The counters of one server, in a registry of its own.

    When no request is in flight, ``requests_admitted_total`` equals the sum of ``requests_finished_total``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.admitted = self._counter("requests_admitted", "Requests taken into the queue")
        self.finished = self._counter(
            "requests_finished", "Admitted requests that ended", "code", "reason"
        )
        self.refused = self._counter("requests_refused", "Requests not taken", "reason")
        self.reload_failures = self._counter(
            "reload_failures", "Files that changed and could not be used", "file"
        )
        self.tenant_requests = self._counter(
            "tenant_requests", "Requests by tenant, once they ended", "tenant", "outcome"
        )
        self.tenant_tokens = self._counter(
            "tenant_tokens", "Tokens of prompts and answers by tenant", "tenant"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.scored_tokens = self._counter(
            "scored_prompt_tokens", "Prompt tokens whose log-probabilities were given"
        )
        self.output_tokens = self._counter("generation_tokens", "Tokens emitted")
        self.samples = self._counter("samples", "Completions that admitted requests asked for")
        self.searches = self._counter("beam_searches", "Requests answered by a beam search")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted", "position"
        )
        self.forced = self._counter("forced_tokens", "Tokens that the form of an answer forced")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "Admission to first token", LATENCY_BUCKETS
        )
        self.gap_s = self._histogram(
            "inter_token_latency_seconds", "Between two responses of a stream", GAP_BUCKETS
        )
        self.request_s = self._histogram(
            "e2e_request_latency_seconds", "Admission to end", LATENCY_BUCKETS
        )

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        Gauge(f"outrider_{name}", text, registry=self.registry).set_function(read)

    def watch_control(self, read: Callable[[], ControlReport | None]) -> None:
        """Add gauges of the gamma controller's report; NaN where a value is unknown."""
        texts = {
            "speed_up": "Tokens per second over those of plain decoding, recently",
            "regret": "Share of the best fixed gamma's tokens per second missed, recently",
            "best_fixed_gamma": "The fixed gamma that would have been best, recently",
            "num_steps_on": "Decoding steps with drafts",
            "num_steps_off": "Decoding steps without",
            "num_probes": "Steps without drafts that measured what drafts gain",
            "cost_share": "Share of the decoding time spent on choosing gamma",
        }
        for name, text in texts.items():
            self.watch(f"control_{name}", text, partial(_field, read, name))

    def watch_reads(self, read: Callable[[], WorkerSnapshot]) -> None:
        """Add what the worker counts of sources: their tokens, and the seconds of each read."""
        self.watch("num_requests_reading", "Source not yet read", lambda: read().num_reading)
        self.registry.register(_Reads(read))

    def watch_prefixes(self, read: Callable[[], WorkerSnapshot]) -> None:
        """Add what the worker's cache of prefixes counts."""
        self.watch(
            "prefix_cache_bytes", "Caches of earlier texts", lambda: read().prefixes.num_bytes
        )
        self.registry.register(_Prefixes(read))

    def count_speculation(self, report: SpeculationReport) -> None:
        """Add the figures of a completed request."""
        self.drafted.inc(report.num_drafted)
        self.accepted.inc(report.num_accepted)
        self.forced.inc(report.num_forced)
        if report.drafted_by_position:
            self.drafts.inc(report.drafted_by_position[0])
        for position, count in enumerate(report.accepted_by_position):
            self.accepted_at.labels(position=str(position)).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outrider_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"outrider_{name}", text, buckets=buckets, registry=self.registry)


class StreamCounts:
    """Counts one stream's tokens and times.

    Args:
        metrics: to add to.
        clock: seconds.
        num_samples: completions of the stream. Its request is timed once: from admission to the first token of any of
            them, and to the end of the last; gaps are those of each.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float], num_samples: int = 1) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._num_open = num_samples
        # By index of the completion, when its last tokens were sent.
        self._last_s: dict[int, float] = {}

    def count(self, batch: Batch) -> None:
        """Add a batch that was sent."""
        now_s, last_s = self._clock(), self._last_s
        num_tokens = len(batch.tokens)
        if isinstance(batch.end, Finished) and batch.end.beams:
            num_tokens = batch.end.num_output
            self._metrics.searches.inc()
        if num_tokens:
            self._metrics.output_tokens.inc(num_tokens)
            if not last_s:
                self._metrics.first_token_s.observe(now_s - self._started_s)
            elif batch.index in last_s:
                self._metrics.gap_s.observe(now_s - last_s[batch.index])
            last_s[batch.index] = now_s
        if batch.prompt:
            self._metrics.scored_tokens.inc(len(batch.prompt))
        if isinstance(batch.end, Finished):
            self._metrics.count_speculation(batch.end.report)
            self._num_open -= 1
            if self._num_open == 0:
                self._metrics.request_s.observe(now_s - self._started_s)


class _Reads(Collector):
    """Reads of sources, as a worker has counted them: it may be in another process."""

    def __init__(self, read: Callable[[], WorkerSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        counts = self._read()
        yield CounterMetricFamily(
            "outrider_source_tokens", "Tokens of sources read", value=counts.num_source_tokens
        )
        bounds = [*map(str, READ_BUCKETS_S), "+Inf"]
        buckets = [*zip(bounds, accumulate(counts.reads_by_s), strict=False)]
        yield HistogramMetricFamily(
            "outrider_read_seconds",
            "A read of one source or several, which running streams wait for",
            buckets=buckets or [("+Inf", 0)],
            sum_value=counts.read_s,
        )


class _Prefixes(Collector):
    """Counters of the cache of prefixes, likewise."""

    def __init__(self, read: Callable[[], WorkerSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts = self._read().prefixes
        for name, text, value in (
            ("queries", "Tokens of prompts that were looked for", counts.num_queried),
            ("hits", "Tokens of prompts that were not computed again", counts.num_found),
            ("evictions", "Pieces of texts that others have replaced", counts.num_evicted),
        ):
            yield CounterMetricFamily(f"outrider_prefix_cache_{name}", text, value=value)


def _field(read: Callable[[], ControlReport | None], name: str) -> float:
    value = getattr(read(), name, None)
    return math.nan if value is None else float(value)
