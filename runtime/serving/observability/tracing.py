"""Traces of requests: the names of a caller's trace, and spans where somebody collects them.

A span is OpenTelemetry's, which is an extra: nothing of it is loaded unless spans are wanted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.events import Finished, Times
from outrider.runtime.core.params import RequestSpec
from outrider.v1 import inference_pb2 as wire

TRACE_HEADERS = ("traceparent", "tracestate")
"""What W3C's Trace Context names the parent by, in HTTP headers as in gRPC metadata."""
MOST_STATE = 512
"""Characters of a ``tracestate``, which W3C asks to be passed on."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry's SDK that say where spans go."""
DISABLED = "OTEL_SDK_DISABLED"
INSTALL = "needs OpenTelemetry: pip install 'outrider-server[otel]'"
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What is known of a request once it has ended.

    Attributes:
        outcome: "admitted" or "refused".
        code: gRPC status that it ended with.
        reason: of the error, or of the end of the answer.
        total_s: from its arrival to its end.
        num_prompt: tokens of the prompt, once they are known.
        num_output: tokens emitted, of all completions.
        spec: as it was queued; None where it was not.
        queued_at_s: when that was, seconds from its arrival.
        first_token_s: likewise, when the first tokens were on their way to the caller; None for never.
        times: on the worker; None where its end was not heard of.
        ends: of its completions, those that ended well.
    """

    outcome: str
    code: str
    reason: str
    total_s: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    spec: RequestSpec | None = None
    queued_at_s: float = 0.0
    first_token_s: float | None = None
    times: Times | None = None
    ends: tuple[Finished, ...] = ()


class Span(Protocol):
    """The span of one request, from its arrival on."""

    trace_id: str

    def asked(self, request: wire.GenerateRequest) -> None:
        """Note what is asked for."""
        ...

    def ended(self, ended: Ended) -> None:
        """End the span."""
        ...


class Spans(Protocol):
    """Makes spans."""

    def begin(self, headers: Mapping[str, str]) -> Span:
        """Return the span of a request that has just arrived, below the one that ``TRACE_HEADERS`` name."""
        ...

    def close(self) -> None:
        """Send what is not sent yet; blocks, for some seconds at most."""
        ...


def open_spans(endpoint: str | None, model_name: str) -> Spans | None:
    """Return what makes spans; None where nobody collects them.

    Args:
        endpoint: URL of a collector of OTLP over gRPC; None for what the SDK's own variables say.
        model_name: that spans name.

    Raises:
        ConfigError: the endpoint is no URL or has a password, a variable of the SDK cannot be used, or OpenTelemetry is
            not installed.
    """
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError("otlp_endpoint", "must be http://HOST:PORT, or https://HOST:PORT for TLS")
    is_disabled = os.environ.get(DISABLED, "").lower() == "true"
    urls = [os.environ.get(one, "") for one in ENDPOINTS] if endpoint is None else [endpoint]
    if is_disabled or not any(urls):
        return None
    if any("@" in one for one in urls):
        # The SDK logs the address of a collector that does not answer.
        rule = "must have no user and password: OTEL_EXPORTER_OTLP_HEADERS holds credentials"
        raise ConfigError("otlp_endpoint", rule)
    parts = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
    if not all(_is_installed(one) for one in parts):
        if endpoint is not None:
            raise ConfigError("otlp_endpoint", INSTALL)
        # The variables may be set for everything that runs on the machine.
        log.warning("no traces, though the environment names a collector: it %s", INSTALL)
        return None
    from outrider.runtime.serving.observability.spans import collected

    try:
        return collected(endpoint, model_name)
    except Exception as error:
        # What the SDK says of its variables may quote them.
        rule = f"cannot be used, or an OTEL_ variable cannot ({type(error).__name__})"
        raise ConfigError("otlp_endpoint", rule) from None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def trace_headers(pairs: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return those of a call's headers that name the caller's span."""
    return {
        name: value
        for name, value in pairs
        if name in TRACE_HEADERS and isinstance(value, str) and len(value) <= MOST_STATE
    }


def trace_id_of(headers: Mapping[str, str]) -> str:
    """Return the name of the caller's trace; empty where there is none."""
    found = _PARENT.fullmatch(headers.get("traceparent", ""))
    return found[1] if found else ""
