"""What both clients open a channel with: retries, keep-alives, metadata, and the health service by hand.

Calls that were refused before anything was streamed are retried by gRPC itself, by the service config below; a stream
that has begun is never retried silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from outrider.errors import decode_error
from outrider.v1 import inference_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name

Metadata: TypeAlias = Mapping[str, str | bytes]
"""Of a call, by key. Keys are lower case; values of keys that end in "-bin" are bytes."""

# grpc.health.v1 by hand, so that the clients need no further package: HealthCheckRequest{service = 1} and
# HealthCheckResponse{status = 1, SERVING = 1} in wire format.
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
HEALTH_REQUEST = bytes((0x0A, len(SERVICE))) + SERVICE.encode()
HEALTH_SERVING = b"\x08\x01"

SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A reader that stalls makes the server stop within some 100 KiB instead of several MiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
)

_TENANT_KEY = "outrider-tenant"


def merged_options(
    options: Sequence[tuple[str, str | int]],
) -> tuple[tuple[str, str | int], ...]:
    """Return ``CHANNEL_OPTIONS`` with further ones, which win."""
    return tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())


def metadata_of(tenant: str | None, more: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return a call's metadata: the client's tenant, unless ``more`` names another one, and ``more``."""
    own: Metadata = {} if tenant is None else {_TENANT_KEY: tenant}
    return tuple({**own, **(more or {})}.items())


@contextmanager
def decoded_errors() -> Iterator[None]:
    """Raise what a call of gRPC ended with as one of ``outrider.errors``."""
    try:
        yield
    except grpc.RpcError as error:
        raise decode_error(error) from error
