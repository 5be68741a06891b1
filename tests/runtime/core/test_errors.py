from __future__ import annotations

import pickle

import pytest
from outrider.engines.base import SpeculativeError
from outrider.runtime.core import errors

CASES = [
    (errors.MalformedRequest(), "MALFORMED_REQUEST"),
    (errors.RequestError("top_p", "must be in (0, 1]"), "INVALID_PARAMETER"),
    (
        errors.ContextTooLong("prompt", "must fit", limit=4, given=5),
        "CONTEXT_LENGTH_EXCEEDED",
    ),
    (errors.ConstraintConflict(), "CONSTRAINT_CONFLICT"),
    (errors.UnsupportedOption("n", "must be 1"), "UNSUPPORTED_OPTION"),
    (errors.DuplicateRequestId(), "DUPLICATE_REQUEST_ID"),
    (errors.ModelNotFound(), "MODEL_NOT_FOUND"),
    (errors.Overloaded(1.5), "QUEUE_FULL"),
    (errors.QuotaExceeded("max_queued", 1.5), "QUOTA_EXCEEDED"),
    (errors.Unauthenticated(), "UNAUTHENTICATED"),
    (errors.PermissionDenied(), "PERMISSION_DENIED"),
    (errors.DeadlineUnreachable(), "HOPELESS"),
    (errors.QueueTimeout(30.0), "QUEUE_TIMEOUT"),
    (errors.DeadlineExceeded(3), "DEADLINE"),
    (errors.Cancelled("client"), "CLIENT_CANCELLED"),
    (errors.Cancelled("abort"), "ABORTED_BY_RPC"),
    (errors.SlowConsumer(), "SLOW_CONSUMER"),
    (errors.NotReady(), "NOT_READY"),
    (errors.ModelChanged(), "MODEL_INTEGRITY"),
    (errors.Draining(), "DRAINING"),
    (errors.DrainDeadline(2), "DRAIN_DEADLINE"),
    (errors.RequestFailed("e1"), "ENGINE_FAILED"),
    (errors.EngineRestart(3), "ENGINE_RESTART"),
    (errors.RequestQuarantined("e1"), "REQUEST_QUARANTINED"),
    (errors.InternalError("e2"), "INTERNAL"),
    (errors.ConfigError("max_running", "must be at least 1"), "CONFIG"),
]


@pytest.mark.parametrize(("error", "reason"), CASES)
def test_every_error_carries_its_reason(error: errors.ServingError, reason: str) -> None:
    assert error.reason == reason
    assert isinstance(error, SpeculativeError)
    assert str(error)


def test_every_class_has_a_case() -> None:
    classes = {
        found
        for found in vars(errors).values()
        if isinstance(found, type) and found.__module__ == errors.__name__
    }
    assert classes - {type(error) for error, _ in CASES} == {errors.ServingError}


def test_a_context_error_says_limit_and_given() -> None:
    error = errors.ContextTooLong("prompt", "must fit", limit=4, given=5)
    assert (error.field, error.limit, error.given) == ("prompt", 4, 5)


@pytest.mark.parametrize("error", [one for one, _ in CASES], ids=lambda one: type(one).__name__)
def test_an_error_crosses_a_process_whole(error: errors.ServingError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.reason, vars(copy)) == (str(error), error.reason, vars(error))
