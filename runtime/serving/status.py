"""The one table from the runtime's error classes to gRPC status, and the details of an error's answer.

Details carry reason codes and limits, never a prompt, an output or a given value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from outrider.runtime.core import errors

DOMAIN = "outrider"
# Backoff hint where the error has none of its own: another replica can be tried at once.
RETRY_ELSEWHERE_S = 1.0

STATUS: Mapping[type[errors.ServingError], grpc.StatusCode] = {
    errors.MalformedRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConstraintConflict: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedOption: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequestId: grpc.StatusCode.ALREADY_EXISTS,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.DeadlineUnreachable: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.SlowConsumer: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.ModelChanged: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.DrainDeadline: grpc.StatusCode.UNAVAILABLE,
    errors.EngineRestart: grpc.StatusCode.UNAVAILABLE,
    errors.RequestFailed: grpc.StatusCode.INTERNAL,
    errors.RequestQuarantined: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

# Attributes of an error that ErrorInfo.metadata carries, and their names there.
_METADATA: Mapping[str, str] = {
    "limit": "limit",
    "given": "given",
    "waited_s": "waited_s",
    "num_output": "emitted",
    "error_id": "error_id",
    "quota": "quota",
}
_NEVER_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
_RETRYABLE = (
    errors.Overloaded,
    errors.QuotaExceeded,
    errors.NotReady,
    errors.ModelChanged,
    errors.Draining,
    errors.EngineRestart,
)


def code_of(error: errors.ServingError) -> grpc.StatusCode:
    """Return the status code of an error's class, or of the nearest above it; where none has a row, INTERNAL: a bug."""
    codes = (STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    return next(codes, grpc.StatusCode.INTERNAL)


def trailing_status(error: errors.ServingError) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    """Return code, message and trailing metadata (rich status, retry pushback) of an error."""
    code = code_of(error)
    wait_s = retry_after_s(error)
    status = status_pb2.Status(code=code.value[0], message=str(error))
    for detail in _details(error, wait_s):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = tuple(rpc_status.to_status(status).trailing_metadata)
    if wait_s is not None:
        trailing += (("grpc-retry-pushback-ms", str(int(wait_s * 1000))),)
    elif code in _NEVER_RETRIED:
        # A negative pushback tells clients not to, whatever their service config says.
        trailing += (("grpc-retry-pushback-ms", "-1"),)
    return code, str(error), trailing


def retry_after_s(error: errors.ServingError) -> float | None:
    """Return the seconds after which another try is reasonable, here or elsewhere; None where none is promised."""
    if not isinstance(error, _RETRYABLE):
        return None
    if isinstance(error, (errors.Overloaded, errors.QuotaExceeded)):
        return error.retry_after_s
    return RETRY_ELSEWHERE_S


def _details(error: errors.ServingError, wait_s: float | None) -> list[Any]:
    metadata = {
        name: str(getattr(error, attribute))
        for attribute, name in _METADATA.items()
        if hasattr(error, attribute)
    }
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if isinstance(error, errors.RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.rule
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QuotaExceeded):
        violation = error_details_pb2.QuotaFailure.Violation(
            subject="tenant", description=error.quota
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if wait_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(wait_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
