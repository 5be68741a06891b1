"""Every way a request or a start-up can end badly, ordered by whose fault it is.

Each class carries the reason code callers branch on; messages name the field, the rule and the
limit and never a value, a prompt or an output. Deliberately knows no transport: one table in the
service maps classes to statuses.
"""

# The names say what happened to the request; every one of them is an error.
# ruff: noqa: N818

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, Self

from outrider.engines.base import SpeculativeError


class ServingError(SpeculativeError):
    """Base of the errors a request can end with; never raised itself.

    Attributes:
        reason: stable code of this kind of error.
        message: of errors that have nothing of their own to say.
    """

    reason: str = "INTERNAL"
    message: str = ""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.message)


class ConfigError(SpeculativeError):
    """A setting is outside what it may be; raised at start-up only.

    Attributes:
        key: name of the setting.
        rule: what it must satisfy.
    """

    reason: str = "CONFIG"

    def __init__(self, key: str, rule: str) -> None:
        super().__init__(f"{key}: {rule}")
        self.key = key
        self.rule = rule

    @classmethod
    def unknown(cls, key: str, name: str, known: Iterable[str]) -> Self:
        """Return the error of a name that is none of the known ones, with the nearest of them."""
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return cls(key, f"has the unknown name {name!r}{hint}")


class MalformedRequest(ServingError):
    """The request's bytes cannot be read as a message at all."""

    reason: str = "MALFORMED_REQUEST"
    message: str = "the request is not a well-formed message"


class RequestError(ServingError):
    """The caller asked for something outside the rules.

    Attributes:
        field: path of the offending field.
        rule: the rule it broke, with its limit.
    """

    reason: str = "INVALID_PARAMETER"

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class ContextTooLong(RequestError):
    """Prompt and answer together do not fit a slot.

    Attributes:
        limit: tokens a slot holds.
        given: tokens the request would need.
    """

    reason: str = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(self, field: str, rule: str, *, limit: int, given: int) -> None:
        super().__init__(field, rule)
        self.limit = limit
        self.given = given


class ConstraintConflict(RequestError):
    """At some position of the answer nothing may follow: the caller's constraints exclude one another there."""

    reason: str = "CONSTRAINT_CONFLICT"

    def __init__(self) -> None:
        rule = "grammar, allowed_token_ids and bad_words must leave a token at every position"
        super().__init__("sampling", rule)


class UnsupportedOption(RequestError):
    """The option is known but this server cannot honour it."""

    reason: str = "UNSUPPORTED_OPTION"


class DuplicateRequestId(ServingError):
    """A request of this name is already queued or running."""

    reason: str = "DUPLICATE_REQUEST_ID"
    message: str = "request_id: a request of this id is already in flight"


class ModelNotFound(ServingError):
    """The named model is not the one being served."""

    reason: str = "MODEL_NOT_FOUND"
    message: str = "model: not served here; ask for the served model or leave it empty"


class Overloaded(ServingError):
    """The queue is full, nothing was kept of the request; another try is reasonable after ``retry_after_s`` seconds."""

    reason: str = "QUEUE_FULL"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the queue is full; try again later or elsewhere")
        self.retry_after_s = retry_after_s


class Unauthenticated(ServingError):
    """Nobody known asks. The answer is the same whatever was wrong with the credentials, or if there were none."""

    reason: str = "UNAUTHENTICATED"
    message: str = "valid credentials are required"


class PermissionDenied(ServingError):
    """Who asks is known, and may not ask for this."""

    reason: str = "PERMISSION_DENIED"
    message: str = "these credentials do not allow the call"


class QuotaExceeded(ServingError):
    """The tenant has used its share; ``retry_after_s`` seconds from now it has some again."""

    reason: str = "QUOTA_EXCEEDED"

    def __init__(self, quota: str, retry_after_s: float) -> None:
        super().__init__(f"{quota}: the tenant's quota is used up; try again later")
        self.quota = quota
        self.retry_after_s = retry_after_s


class DeadlineUnreachable(ServingError):
    """The caller's deadline is nearer than the first token could be; nothing was done."""

    reason: str = "HOPELESS"
    message: str = "the deadline would pass before a first token; try another replica"


class QueueTimeout(ServingError):
    """The request waited for a slot for too long, ``waited_s`` seconds."""

    reason: str = "QUEUE_TIMEOUT"

    def __init__(self, waited_s: float) -> None:
        super().__init__("no slot became free within the queue timeout")
        self.waited_s = waited_s


class DeadlineExceeded(ServingError):
    """The caller's deadline passed, after ``num_output`` tokens were emitted."""

    reason: str = "DEADLINE"

    def __init__(self, num_output: int) -> None:
        super().__init__("the request's deadline passed")
        self.num_output = num_output


class Cancelled(ServingError):
    """Someone asked for the request to end.

    Attributes:
        by: "client" when the call was cancelled, "abort" when the abort method named it.
        reason: CLIENT_CANCELLED or ABORTED_BY_RPC accordingly.
    """

    def __init__(self, by: Literal["client", "abort"] = "client") -> None:
        super().__init__("the request was cancelled")
        self.by = by
        self.reason = "CLIENT_CANCELLED" if by == "client" else "ABORTED_BY_RPC"


class SlowConsumer(ServingError):
    """The client did not read its stream fast enough."""

    reason: str = "SLOW_CONSUMER"
    message: str = "too many chunks are waiting to be read"


class NotReady(ServingError):
    """The server is still starting; ``stage`` is what it is at, if somebody has said so."""

    reason: str = "NOT_READY"

    def __init__(self, stage: str = "") -> None:
        super().__init__("the server is still starting" + (f": {stage}" if stage else ""))


class ModelChanged(ServingError):
    """A file that the engines compute from is not what was checked at the start."""

    reason: str = "MODEL_INTEGRITY"
    message: str = "a file of the model was changed under the server; try another replica"


class Draining(ServingError):
    """The server is shutting down and takes nothing new."""

    reason: str = "DRAINING"
    message: str = "the server is shutting down; try another replica"


class DrainDeadline(ServingError):
    """The time to drain was over while the request ran; a caller can resume from its ``num_output`` tokens."""

    reason: str = "DRAIN_DEADLINE"

    def __init__(self, num_output: int = 0) -> None:
        super().__init__("the server shut down before the request was finished")
        self.num_output = num_output


class EngineRestart(ServingError):
    """The engine hung or died while the request was aboard, ``num_output`` tokens were emitted."""

    reason: str = "ENGINE_RESTART"

    def __init__(self, num_output: int = 0) -> None:
        super().__init__("the engine stopped working; try another replica")
        self.num_output = num_output


class RequestFailed(ServingError):
    """The backend failed in a step this request took part in; ``error_id`` is in the server's log."""

    reason: str = "ENGINE_FAILED"

    def __init__(self, error_id: str) -> None:
        super().__init__(f"the engine failed; error id {error_id}")
        self.error_id = error_id


class RequestQuarantined(ServingError):
    """The request makes steps fail that go well without it; ``error_id`` as of ``RequestFailed``."""

    reason: str = "REQUEST_QUARANTINED"

    def __init__(self, error_id: str) -> None:
        super().__init__(f"the engine fails for this request alone; error id {error_id}")
        self.error_id = error_id


class InternalError(ServingError):
    """An invariant of the server is broken: our bug; ``error_id`` as of ``RequestFailed``."""

    reason: str = "INTERNAL"

    def __init__(self, error_id: str) -> None:
        super().__init__(f"internal error; error id {error_id}")
        self.error_id = error_id
