"""How operators watch a server, as its options say."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.runtime.serving.observability.logs import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """What a server tells of itself.

    Attributes:
        metrics_address: of Prometheus metrics over HTTP, host and port or ``unix:PATH``; None for none.
        has_vllm_names: whether these are told under vLLM's names, too.
        logs: how it logs; set up by whoever starts the process.
        otlp_endpoint: URL of a collector of traces, OTLP over gRPC; None for what OpenTelemetry's own variables say.
    """

    metrics_address: str | None = None
    has_vllm_names: bool = False
    logs: LogOptions = field(default_factory=LogOptions)
    otlp_endpoint: str | None = None
