"""Prometheus metrics of a server that its event loop counts: requests, tokens, times, speculation.

Names are vLLM's behind the prefix ``outrider_`` where vLLM has the metric. What the worker counts is in
``runtime.serving.observability.worker``; what a scrape is told, with ``model_name`` on each sample, in
``runtime.serving.observability.scrape_collector``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.runtime.core.events import Finished, SpeculationReport, Times
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.serving.observability.histogram import Histogram
from outrider.runtime.serving.observability.process import BuildInfo, LoopLag
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
        loop_lag: to have watched on the event loop.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BuildInfo())
        self.loop_lag = LoopLag()
        self.registry.register(self.loop_lag)
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
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft",
            "position",
        )
        self.forced = self._counter("forced_tokens", "Tokens that the form of an answer forced")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "Admission to first token", LATENCY_BUCKETS
        )
        self.gap_s = self._histogram(
            "inter_token_latency_seconds",
            "Per token, the time since the response before divided over the response's tokens",
            GAP_BUCKETS,
        )
        self.request_s = self._histogram(
            "e2e_request_latency_seconds", "Admission to end", LATENCY_BUCKETS
        )
        self._parts_s = {
            part: self._histogram(f"request_{part}_time_seconds", text, LATENCY_BUCKETS)
            for part, text in (
                ("queue", "Waiting for a slot"),
                ("prefill", "From the slot to the first token, of a request that was answered"),
                ("decode", "From the first token to the last, likewise"),
                ("inference", "From the slot to the last token, likewise"),
            )
        }
        self._lengths = {
            name: self._histogram(f"request_{name}", text, buckets)
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

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        Gauge(f"outrider_{name}", text, registry=self.registry).set_function(read)

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

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"outrider_{name}", text, buckets)
        self.registry.register(histogram)
        return histogram


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
                gap_s = (now_s - last_s[batch.index]) / num_tokens
                self._metrics.gap_s.observe(gap_s, num_tokens)
            last_s[batch.index] = now_s
        if batch.prompt:
            self._metrics.scored_tokens.inc(len(batch.prompt))
        if isinstance(batch.end, Finished):
            self._metrics.count_speculation(batch.end.report)
            self._num_open -= 1
            if self._num_open == 0:
                self._metrics.request_s.observe(now_s - self._started_s)
