"""Spans of requests: whose children they are, what they say, and that collectors get them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode
from outrider import CallError
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.observability import spans as watched
from outrider.runtime.serving.observability import tracing
from outrider.runtime.serving.observability.spans import RequestSpans
from outrider.runtime.serving.observability.tracing import open_spans, trace_headers, trace_id_of

from tests.runtime.serving.observability.collector import collecting

TRACE, PARENT = "a" * 32, "b" * 16


def parent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "us=1"}


class Kept:
    """Spans that are kept in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider, "letters")

    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


async def test_a_span_is_the_caller_s_child_and_says_what_was_asked_and_answered(start):
    kept = Kept()
    async with start(spans=kept.spans) as run:
        options = {"max_tokens": 12, "temperature": 0.0, "seed": 5, "request_id": "mine"}
        async for _ in run.client.generate("secret", metadata=parent(), **options):
            pass
    (span,) = kept.ended()
    assert span.name == "text_completion letters" and span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["us"] == "1"
    found = dict(span.attributes)
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0.0
    steps = found.pop("outrider.speculation.tokens_per_step")
    drafted = found.pop("outrider.speculation.num_drafted")
    accepted = found.pop("outrider.speculation.num_accepted")
    assert steps > 1.0 and drafted >= accepted > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "letters",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "letters",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "outrider.speculation.drafter": "model",
    }
    assert span.status.status_code is StatusCode.UNSET
    names = [event.name for event in span.events]
    assert names == ["queue_left", "prompt_read", "first_token"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)


def test_names_are_those_of_the_conventions():
    known = {
        value
        for name, value in vars(gen_ai_attributes).items()
        if name.startswith("GEN_AI_") and isinstance(value, str)
    }
    with open(importlib.util.find_spec(RequestSpans.__module__).origin, encoding="utf-8") as file:
        source = file.read()
    used = {word for word in source.split('"') if word.startswith("gen_ai.")}
    # 0.66b2 of the conventions has no constant for the time to the first chunk.
    assert len(used) > 10 and used - {"gen_ai.response.time_to_first_chunk"} <= known


async def test_who_is_not_sampled_by_the_caller_has_no_span_but_its_name_in_the_log(start):
    kept = Kept()
    async with start(spans=kept.spans) as run:
        async for _ in run.client.generate("a", max_tokens=2, metadata=parent("00")):
            pass
    assert not kept.ended()
    assert kept.spans.begin(parent("00")).trace_id == TRACE


async def test_a_refusal_is_the_caller_s_fault_and_a_deadline_the_server_s(start_endless):
    kept = Kept()
    async with start_endless(spans=kept.spans) as run:
        with pytest.raises(CallError):
            async for _ in run.client.generate("secret", stop=["secret"] * 99):
                pass
        stream = run.endless()
        await anext(stream)
        run.server.hurry()
        await run.server.drain()
        with pytest.raises(CallError):
            async for _ in stream:
                pass
    refused, cut = kept.ended()
    assert refused.attributes["error.type"] == "INVALID_PARAMETER"
    assert refused.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert refused.status.status_code is StatusCode.UNSET
    assert cut.attributes["error.type"] == "DRAIN_DEADLINE"
    assert cut.status.status_code is StatusCode.ERROR
    assert [event.name for event in cut.events] == ["queue_left", "prompt_read", "first_token"]
    assert "secret" not in refused.to_json() + cut.to_json()


async def test_completions_of_a_prompt_are_one_span(start):
    kept = Kept()
    async with start(spans=kept.spans) as run:
        async for _ in run.client.generate("abc", max_tokens=4, n=3):
            pass
    (span,) = kept.ended()
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 3
    assert [event.name for event in span.events] == ["queue_left", "prompt_read", "first_token"]


async def test_a_collector_is_sent_spans_over_grpc(start, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,zone=a")
    with collecting() as collector:
        spans = open_spans(collector.url, "letters")
        assert spans is not None
        async with start(spans=spans) as run:
            async for _ in run.client.generate("abc", max_tokens=4, metadata=parent()):
                pass
        spans.close()
    (span,) = collector.spans
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    resource = collector.requests[0].resource_spans[0].resource
    values = {one.key: one.value.string_value for one in resource.attributes}
    assert (values["service.name"], values["zone"]) == ("mine", "a")
    assert values["service.version"]


def test_a_collector_that_answers_nobody_keeps_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watched, "FLUSH_S", 0.0)
    ends = threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            assert ends.wait(60)
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Silent()))
    spans = RequestSpans(provider, "letters")
    spans.begin({}).ended(tracing.Ended(outcome="refused", code="OK", reason="x"))
    closing = threading.Thread(target=spans.close, daemon=True)
    closing.start()
    closing.join(20.0)
    has_closed = not closing.is_alive()
    ends.set()
    assert has_closed


def test_variables_of_opentelemetry_turn_spans_on_and_off(monkeypatch):
    for name in (*tracing.ENDPOINTS, tracing.DISABLED):
        monkeypatch.delenv(name, raising=False)
    assert open_spans(None, "m") is None
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        spans = open_spans(None, "m")
        assert spans is not None
        spans.begin({}).ended(tracing.Ended(outcome="refused", code="OK", reason="x"))
        spans.close()
        assert len(collector.spans) == 1
    monkeypatch.setenv(tracing.DISABLED, "true")
    assert open_spans("http://localhost:1", "m") is None


def test_an_endpoint_that_is_none_and_a_library_that_is_missing_are_refused(monkeypatch, caplog):
    with pytest.raises(ConfigError, match="otlp_endpoint: must be http://HOST:PORT"):
        open_spans("localhost:4317", "m")
    monkeypatch.setattr(tracing, "_is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"otlp_endpoint: .*outrider-server\[otel\]"):
        open_spans("http://localhost:4317", "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    assert open_spans(None, "m") is None
    assert "no traces" in caplog.text


@pytest.mark.parametrize(
    "variable",
    ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_COMPRESSION"],
)
def test_a_variable_that_the_library_cannot_read_is_refused_and_not_told(monkeypatch, variable):
    monkeypatch.setenv(variable, "secret")
    with pytest.raises(ConfigError, match="otlp_endpoint: cannot be used, or an OTEL_") as refused:
        open_spans("http://localhost:4317", "m")
    assert "secret" not in str(refused.value)


def test_credentials_in_an_address_are_refused_and_malformed_headers_not_told(monkeypatch, caplog):
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        open_spans("http://user:secret@localhost:4317", "m")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@localhost:4317")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        open_spans(None, "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization Bearer secret")
    spans = open_spans("http://localhost:1", "m")
    assert spans is not None
    spans.close()
    assert "OTEL_EXPORTER_OTLP_HEADERS is not sent" in caplog.text and "secret" not in caplog.text


def test_nothing_of_opentelemetry_is_loaded_unless_it_is_asked_for():
    code = "import sys, outrider.runtime.serving.process\nprint('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, ""),
        (parent(), TRACE),
        ({"traceparent": f"00-{TRACE}-{PARENT}"}, ""),
        ({"traceparent": f"00-{TRACE.upper()}-{PARENT}-01"}, ""),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01\nx"}, ""),
    ],
)
def test_a_trace_s_name_is_read_from_a_well_formed_parent_alone(headers, name):
    assert trace_id_of(headers) == name


def test_of_a_call_s_headers_those_of_the_trace_are_taken_within_bounds():
    given = [("traceparent", "p"), ("x", "y"), ("tracestate", "s" * 513), ("tracestate-bin", b"")]
    assert trace_headers(given) == {"traceparent": "p"}
