"""Spans of OpenTelemetry: one per request of any protocol, with the semantic conventions of generative AI.

A span is begun and ended by hand: a context that is attached across an ``await`` of a stream would be detached in
another one. It is the caller's child where the caller names its span, and sampled as that one is. What happens
meanwhile is put down at its end, from durations that were taken anyway. No prompt, answer or stop string is in a span.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from outrider.runtime.serving.observability.process import server_version
from outrider.runtime.serving.observability.tracing import Ended
from outrider.runtime.serving.requests.spec import has_search, num_results, sampling_of
from outrider.v1 import inference_pb2 as wire

PROVIDER = "outrider"
FLUSH_S = 5.0
SERVER_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE"))
"""Statuses that OpenTelemetry's conventions for RPC servers call errors; others are the caller's."""
_QUOTING = "opentelemetry.util.re"
"""Logger of the SDK that quotes what it cannot read of a variable with credentials."""
_PARENT = TraceContextTextMapPropagator()


def collected(endpoint: str | None, model_name: str) -> RequestSpans:
    """Return spans that go to a collector of OTLP over gRPC, in batches, from a thread of their own."""
    logging.getLogger(_QUOTING).addFilter(_without_header)
    own = Resource({SERVICE_NAME: PROVIDER, SERVICE_VERSION: server_version()})
    # Environment variables have the last word.
    resource = Resource.create(own.merge(OTELResourceDetector().detect()).attributes)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider, model_name)


def _without_header(record: logging.LogRecord) -> bool:
    """Say which variable is wrong, and nothing of its value."""
    record.msg, record.args = (
        "a header of OTEL_EXPORTER_OTLP_HEADERS is not sent: no NAME=VALUE",
        (),
    )
    return True


class RequestSpans:
    """Makes spans with a provider."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("outrider", server_version())
        self._model_name = model_name

    def begin(self, headers: Mapping[str, str]) -> RequestSpan:
        """Return the span of a request that has just arrived."""
        began_ns = time.time_ns()
        span = self._tracer.start_span(
            f"text_completion {self._model_name}",
            context=_PARENT.extract(headers),
            kind=SpanKind.SERVER,
            start_time=began_ns,
        )
        return RequestSpan(span, began_ns, self._model_name)

    def close(self) -> None:
        """Send what is not sent yet, for ``FLUSH_S`` at most: a collector that answers nobody keeps no process."""
        # The library's own limits do not bound an export that has begun.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)


class RequestSpan:
    """One request's.

    Attributes:
        trace_id: 32 digits.
    """

    def __init__(self, span: OtelSpan, began_ns: int, model_name: str) -> None:
        self._span = span
        self._began_ns = began_ns
        self._model_name = model_name
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def asked(self, request: wire.GenerateRequest) -> None:
        """Note what is asked for."""
        if not self._span.is_recording():
            return
        operation = "chat" if request.HasField("chat") else "text_completion"
        self._span.update_name(f"{operation} {self._model_name}")
        params = sampling_of(request.sampling, has_search=has_search(request))
        self._set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": request.model or self._model_name,
                "gen_ai.request.max_tokens": request.max_tokens
                if request.HasField("max_tokens")
                else None,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": params.top_k,
                "gen_ai.request.seed": request.sampling.seed
                if request.sampling.HasField("seed")
                else None,
                "gen_ai.request.choice.count": 1 if has_search(request) else num_results(request),
            }
        )

    def ended(self, ended: Ended) -> None:
        """End the span, with what is known of the request by then."""
        if self._span.is_recording():
            self._tell_times(ended)
            self._tell_answer(ended)
            if ended.code != "OK":
                self._set({"error.type": ended.reason, "rpc.response.status_code": ended.code})
            if ended.code in SERVER_FAULTS:
                self._span.set_status(Status(StatusCode.ERROR, ended.reason))
        self._span.end(self._ns(ended.total_s))

    def _tell_times(self, ended: Ended) -> None:
        """Add events; the worker's times begin a little before the record's or, in another process, after them."""
        first_s, times, at_s = ended.first_token_s, ended.times, ended.queued_at_s
        if first_s is None:
            return
        if times is not None:
            self._event("queue_left", min(at_s + times.queued_s, first_s))
            self._event("prompt_read", min(at_s + times.queued_s + times.prefill_s, first_s))
        self._event("first_token", first_s)

    def _tell_answer(self, ended: Ended) -> None:
        spec = ended.spec
        if spec is None:
            return
        self._set(
            {
                "gen_ai.request.max_tokens": spec.max_tokens,
                "gen_ai.response.id": spec.request_id,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.time_to_first_chunk": ended.first_token_s,
                "gen_ai.usage.input_tokens": ended.num_prompt,
                "gen_ai.usage.output_tokens": ended.num_output,
            }
        )
        if not ended.ends:
            return
        reports = [one.report for one in ended.ends]
        num_steps = sum(one.num_steps for one in reports)
        num_emitted = sum(one.num_emitted for one in reports)
        self._set(
            {
                "gen_ai.response.finish_reasons": [one.reason.value for one in ended.ends],
                "gen_ai.usage.cache_read.input_tokens": max(one.num_cached for one in ended.ends),
                "outrider.speculation.drafter": reports[0].drafter,
                "outrider.speculation.off_reason": reports[0].off_reason,
                "outrider.speculation.num_drafted": sum(one.num_drafted for one in reports),
                "outrider.speculation.num_accepted": sum(one.num_accepted for one in reports),
                "outrider.speculation.tokens_per_step": num_emitted / num_steps
                if num_steps
                else None,
            }
        )

    def _set(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        """Set those attributes that have a value."""
        self._span.set_attributes(
            {name: value for name, value in attributes.items() if value is not None}
        )

    def _event(self, name: str, at_s: float) -> None:
        self._span.add_event(name, timestamp=self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._began_ns + round(at_s * 1e9)
