"""Prometheus metrics of a server that its event loop counts: requests, tokens, times, speculation.

Names are vLLM's behind the prefix ``outrider_`` where vLLM has the metric. What the worker counts is in
``runtime.serving.observability.worker``; what a scrape is told, with ``model_name`` on each sample, in
``runtime.serving.observability.scrape_collector``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from outrider.runtime.core.events import Finished, SpeculationReport, Times
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.observability.histogram import Histogram
from outrider.runtime.serving.observability.process import BuildInfo, ProcessMetrics
from outrider.runtime.serving.response_stream import Batch
from prometheus_client import CollectorRegistry, Counter, Gauge

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LENGTH_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
SAMPLE_BUCKETS = (1.0, 2.0, 4.0, 8.0)


class Metrics:
    """The counters of one server, in a registry of its own.

    When no request is in flight, ``requests_admitted_total`` equals the sum of ``requests_finished_total``.

    Attributes:
        registry: to add further collectors to.
        process: of the server's process.
        speculation: drafts of completed requests.
        requests: times and lengths.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BuildInfo())
        self.process = ProcessMetrics(self.registry)
        counter = partial(_counter, self.registry)
        self.admitted = counter("requests_admitted", "Requests taken into the queue")
        self.finished = counter(
            "requests_finished", "Admitted requests that ended", "code", "reason"
        )
        self.refused = counter("requests_refused", "Requests not taken", "reason")
        self.tenant_requests = counter(
            "tenant_requests", "Requests by tenant, once they ended", "tenant", "outcome"
        )
        self.tenant_tokens = counter(
            "tenant_tokens", "Tokens of prompts and answers by tenant", "tenant"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.scored_tokens = counter(
            "scored_prompt_tokens", "Prompt tokens whose log-probabilities were given"
        )
        self.output_tokens = counter("generation_tokens", "Tokens emitted")
        self.samples = counter("samples", "Completions that admitted requests asked for")
        self.searches = counter("beam_searches", "Requests answered by a beam search")
        self.speculation = SpeculationMetrics(self.registry)
        self.requests = RequestHistograms(self.registry)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        Gauge(f"outrider_{name}", text, registry=self.registry).set_function(read)


class SpeculationMetrics:
    """Counters of drafts, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(_counter, registry)
        self._drafts = counter("spec_decode_num_drafts", "Rounds that drafted")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft",
            "position",
        )
        self._forced = counter("forced_tokens", "Tokens that the form of an answer forced")

    def count(self, report: SpeculationReport) -> None:
        """Add the figures of a completed request."""
        self._drafted.inc(report.num_drafted)
        self._accepted.inc(report.num_accepted)
        self._forced.inc(report.num_forced)
        if report.drafted_by_position:
            self._drafts.inc(report.drafted_by_position[0])
        for position, count in enumerate(report.accepted_by_position):
            self._accepted_at.labels(position=str(position)).inc(count)


class RequestHistograms:
    """Times and lengths of requests, in a registry.

    Attributes:
        first_token_s: seconds from admission to the first token.
        gap_s: seconds between tokens.
        request_s: seconds from admission to the end.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(_histogram, registry)
        self.first_token_s = histogram(
            "time_to_first_token_seconds",
            "Admission to first token, also of a request that is aborted behind it",
            LATENCY_BUCKETS,
        )
        self.gap_s = histogram(
            "inter_token_latency_seconds",
            "Per token, the time since the response before divided over the response's tokens",
            GAP_BUCKETS,
        )
        self.request_s = histogram(
            "e2e_request_latency_seconds",
            "Admission to end, of a request that was answered: not of an aborted or failed one",
            LATENCY_BUCKETS,
        )
        self._parts_s = {
            part: histogram(f"request_{part}_time_seconds", text, LATENCY_BUCKETS)
            for part, text in (
                ("queue", "Waiting for a slot"),
                ("prefill", "From the slot to the first token, of a request that was answered"),
                ("decode", "From the first token to the last, likewise"),
                ("inference", "From the slot to the last token, likewise"),
            )
        }
        self._lengths = {
            name: histogram(f"request_{name}", text, buckets)
            for name, text, buckets in (
                ("prompt_tokens", "Prompt tokens of a request that was answered", LENGTH_BUCKETS),
                (
                    "generation_tokens",
                    "Tokens of its answer, all completions together",
                    LENGTH_BUCKETS,
                ),
                (
                    "params_max_tokens",
                    "Tokens that it asked for at most, per completion",
                    LENGTH_BUCKETS,
                ),
                ("params_n", "Completions that it asked for", SAMPLE_BUCKETS),
            )
        }

    def count_queued(self, times: Times) -> None:
        """Add how long a request waited for its slot, or to its end where it got none."""
        self._parts_s["queue"].observe(times.queued_s)

    def count_answered(self, spec: RequestSpec, times: Times, num_output: int) -> None:
        """Add the times and lengths of a request whose completions have all ended well."""
        self._parts_s["prefill"].observe(times.prefill_s)
        self._parts_s["decode"].observe(times.decode_s)
        self._parts_s["inference"].observe(times.prefill_s + times.decode_s)
        self._lengths["prompt_tokens"].observe(spec.num_prompt_tokens)
        self._lengths["generation_tokens"].observe(num_output)
        self._lengths["params_max_tokens"].observe(spec.max_tokens)
        self._lengths["params_n"].observe(spec.num_samples)


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
                self._metrics.requests.first_token_s.observe(now_s - self._started_s)
            elif batch.index in last_s:
                gap_s = (now_s - last_s[batch.index]) / num_tokens
                self._metrics.requests.gap_s.observe(gap_s, num_tokens)
            last_s[batch.index] = now_s
        if batch.prompt:
            self._metrics.scored_tokens.inc(len(batch.prompt))
        if isinstance(batch.end, Finished):
            self._metrics.speculation.count(batch.end.report)
            self._num_open -= 1
            if self._num_open == 0:
                self._metrics.requests.request_s.observe(now_s - self._started_s)


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"outrider_{name}", text, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]
) -> Histogram:
    histogram = Histogram(f"outrider_{name}", text, buckets)
    registry.register(histogram)
    return histogram
