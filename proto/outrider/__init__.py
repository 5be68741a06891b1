"""Client of an Outrider server."""

from outrider.client import Client, build_request
from outrider.errors import (
    CallCancelled,
    CallError,
    DeadlineExceeded,
    FieldViolation,
    Overloaded,
    RequestRefused,
    ServerFailed,
    Unavailable,
)

__all__ = [
    "CallCancelled",
    "CallError",
    "Client",
    "DeadlineExceeded",
    "FieldViolation",
    "Overloaded",
    "RequestRefused",
    "ServerFailed",
    "Unavailable",
    "build_request",
]
