"""What both clients open a channel with: retries, keep-alives, metadata, and the health service by hand.

Calls that were refused before anything was streamed are retried by gRPC itself, by the service config below; a stream
that has begun is never retried silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from outrider.access import Access
from outrider.errors import decode_error
from outrider.v1 import inference_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name

Metadata: TypeAlias = Mapping[str, str | bytes]
"""Of a call, by key. Keys are lower case; values of keys that end in "-bin" are bytes."""

# grpc.health.v1 by hand, so that the clients need no further package; HealthCheckResponse{status = 1, SERVING = 1} in
# wire format.
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
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
    # A draining replica refuses its whole queue at once, and all 256 calls may be one client's. gRPC stops retrying at
    # half of the tokens; a refused attempt takes one, a call that ends well gives one back.
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
}

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    # A replica that was restarted is found again within two seconds, not within gRPC's two minutes: before the next one
    # of a rolling restart goes.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A reader that stalls makes the server stop within some 100 KiB instead of several MiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
)

PROBE_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.service_config", "{}"),
)
"""Of a channel that also calls a server which says that it is not serving."""

_TENANT_KEY = "outrider-tenant"
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_METADATA_TEXT = re.compile(r"[ -~]*")


def health_request(service: str) -> bytes:
    """Return HealthCheckRequest{service = 1} in wire format.

    Raises:
        ValueError: no service has so long a name.
    """
    name = service.encode()
    if len(name) > 127:
        raise ValueError("service: must be at most 127 bytes of UTF-8")
    return bytes((0x0A, len(name))) + name


def merged_options(
    options: Sequence[tuple[str, str | int]],
) -> tuple[tuple[str, str | int], ...]:
    """Return ``CHANNEL_OPTIONS`` with further ones, which win."""
    return tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())


def own_metadata(tenant: str | None, access: Access) -> Metadata:
    """Return what a client sends with every call: its tenant, and its key where the channel does not send that."""
    return {**({} if tenant is None else {_TENANT_KEY: tenant}), **access.metadata}


def metadata_of(own: Metadata, more: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return a call's metadata: the client's own, and ``more``, which wins.

    Raises:
        ValueError: gRPC can send no such key or value.
    """
    merged = {**own, **(more or {})}
    for key, value in merged.items():
        if not isinstance(key, str) or not _METADATA_KEY.fullmatch(key):
            raise ValueError(
                f"metadata: key {key!r} must be of lower case letters, digits, _ - and ."
            )
        if key.endswith("-bin"):
            if not isinstance(value, bytes):
                raise ValueError(f"metadata: value of {key!r} must be bytes")
        elif not _is_text(value):
            raise ValueError(f"metadata: value of {key!r} must be printable ASCII text")
    return tuple(merged.items())


def check_open(is_closed: bool) -> None:
    """Raise RuntimeError for a call of a client that is closed."""
    if is_closed:
        raise RuntimeError("the client is closed")


def end_call(call: Any) -> None:
    """Cancel a stream; where an interceptor made a generator of it, close that."""
    end = getattr(call, "cancel", None) or getattr(call, "close", None)
    if end is not None:
        end()


def _is_text(value: object) -> bool:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    return isinstance(value, str) and _METADATA_TEXT.fullmatch(value) is not None


@contextmanager
def decoded_errors() -> Iterator[None]:
    """Raise what a call of gRPC ended with as one of ``outrider.errors``."""
    try:
        yield
    except grpc.RpcError as error:
        raise decode_error(error) from error
