"""The server's error answers as exceptions, one class per reaction of the caller."""

# Named after what happened, as the reasons are.
# ruff: noqa: N818

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "outrider"
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field of the request and the rule it broke."""

    field: str
    rule: str


class CallError(Exception):
    """A call did not end OK.

    Attributes:
        code: gRPC status code.
        reason: the server's reason, for example ``QUEUE_FULL``; empty when the answer came from the transport.
        metadata: facts that belong to the reason, for example ``limit``, ``given``, ``emitted``, ``error_id``.
        violations: fields that broke a rule.
        retry_after_s: seconds the server asked to wait before another try, or None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason or code.name}: {message}")
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.violations = violations
        self.retry_after_s = retry_after_s


class RequestRefused(CallError):
    """The request itself is at fault; sending it again is of no use."""


class Overloaded(CallError):
    """The server has too much to do; try later or elsewhere."""


class QuotaExceeded(Overloaded):
    """The tenant has used its share, ``metadata["quota"]`` names which; there is some again in ``retry_after_s``."""


class Unauthenticated(CallError):
    """The server does not know the caller: no credentials, or not valid ones; it does not say which."""


class PermissionDenied(CallError):
    """The server knows the caller, who may not ask for this."""


class Unavailable(CallError):
    """The server cannot be reached, is starting or shutting down; try another one."""


class DeadlineExceeded(CallError):
    """The call's deadline or the server's queue timeout passed."""


class DeadlineUnreachable(DeadlineExceeded):
    """The deadline is nearer than a first token could be; nothing was done, another server may make it."""


Hopeless = DeadlineUnreachable
"""Its name before 0.3."""


class CallCancelled(CallError):
    """The request was ended by Abort or by a cancellation."""


class ServerFailed(CallError):
    """The server's fault; ``metadata["error_id"]`` finds it in its log."""


_CLASS_OF_CODE: Mapping[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.NOT_FOUND: RequestRefused,
    grpc.StatusCode.ALREADY_EXISTS: RequestRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.UNIMPLEMENTED: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: CallCancelled,
    grpc.StatusCode.INTERNAL: ServerFailed,
}
# A replica of the add-on for Ray died with the request; and what Ray says of that: an actor of this name died, or
# one by its id is unavailable.
_LOST = "REPLICA_LOST"
_RAY_REPLICA = re.compile("SERVE_REPLICA::|The actor [0-9a-f]+ is unavailable")
# Reasons whose reaction is another than their code's.
_CLASS_OF_REASON: Mapping[str, type[CallError]] = {
    "QUOTA_EXCEEDED": QuotaExceeded,
    "HOPELESS": DeadlineUnreachable,
}


def decode_error(error: grpc.RpcError) -> CallError:
    """Return the exception that carries what the server's rich status says."""
    reason, metadata = "", dict[str, str]()
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in _rich_status(error).details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request):
            violations = tuple(
                FieldViolation(field=violation.field, rule=violation.description)
                for violation in bad_request.field_violations
            )
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    if not reason and _is_lost(error):
        code = grpc.StatusCode.UNAVAILABLE
        return Unavailable(code, "the replica that served the request is gone", reason=_LOST)
    kind = _CLASS_OF_CODE.get(error.code(), CallError)
    return _CLASS_OF_REASON.get(reason, kind)(
        error.code(),
        error.details() or "",
        reason=reason,
        metadata=metadata,
        violations=violations,
        retry_after_s=retry_after_s,
    )


def _is_lost(error: grpc.RpcError) -> bool:
    """Return whether a replica behind Ray's proxy died: the server says so beforehand, else the proxy in its words."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAVAILABLE:
        return details.startswith(f"{_LOST}: ")
    return code == grpc.StatusCode.INTERNAL and _RAY_REPLICA.search(details) is not None


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    """Return the server's rich status; an empty one where there is none, or where it is of another end than the call's.

    The latter is a call whose own deadline passed while the server's answer was on its way.
    """
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if (status.code, status.message) == (error.code().value[0], error.details()):
                return status
    return status_pb2.Status()
