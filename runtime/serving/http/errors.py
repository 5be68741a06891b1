"""The one table from the runtime's error classes to HTTP, and the answers and events that errors become.

Clients of OpenAI retry 408, 409, 429 and what is 500 or more; ``x-should-retry`` overrides that. So a duplicate id is
400, and what would fail again says so. Bodies carry reasons and limits, never a prompt, an output or a given value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

from outrider.runtime.core import errors
from outrider.runtime.serving.status import retry_after_s

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable"
INTERNAL = "internal_error"


class NoSuchRoute(errors.ServingError):
    """Nothing is at the path; says where there is something."""

    reason: str = "NOT_FOUND"

    def __init__(self, paths: Iterable[str]) -> None:
        served = ", ".join(dict.fromkeys(paths))
        super().__init__(f"there is nothing at this path; served are {served}")


class WrongMethod(errors.ServingError):
    """The path has other methods."""

    reason: str = "METHOD_NOT_ALLOWED"
    message: str = "the path does not have this method"


class BodyTooLarge(errors.RequestError):
    """The body is longer than any request may be."""

    def __init__(self, most: int) -> None:
        super().__init__("body", f"must be at most {most} bytes")


class SlowBody(errors.RequestError):
    """The body did not arrive in time."""

    def __init__(self, most_s: float) -> None:
        super().__init__("body", f"must arrive within {most_s:.0f} s")


TABLE: Mapping[type[errors.ServingError], tuple[int, str]] = {
    errors.MalformedRequest: (400, INVALID),
    errors.RequestError: (400, INVALID),
    errors.ContextTooLong: (400, INVALID),
    errors.ConstraintConflict: (400, INVALID),
    errors.UnsupportedOption: (400, INVALID),
    errors.DuplicateRequestId: (400, INVALID),
    BodyTooLarge: (413, INVALID),
    SlowBody: (400, INVALID),
    errors.ModelNotFound: (404, "NotFoundError"),
    NoSuchRoute: (404, INVALID),
    WrongMethod: (405, INVALID),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.Overloaded: (429, "rate_limit_exceeded"),
    errors.QuotaExceeded: (429, "rate_limit_exceeded"),
    errors.SlowConsumer: (408, "timeout"),
    errors.DeadlineUnreachable: (504, "timeout"),
    errors.QueueTimeout: (504, "timeout"),
    errors.DeadlineExceeded: (504, "timeout"),
    errors.Cancelled: (499, "cancelled"),
    errors.NotReady: (503, UNAVAILABLE),
    errors.ModelChanged: (503, UNAVAILABLE),
    errors.Draining: (503, UNAVAILABLE),
    errors.DrainDeadline: (503, UNAVAILABLE),
    errors.EngineRestart: (503, UNAVAILABLE),
    errors.RequestFailed: (500, INTERNAL),
    errors.RequestQuarantined: (500, INTERNAL),
    errors.InternalError: (500, INTERNAL),
}
# Another try would end alike, or nobody waits for it.
_NEVER_RETRIED = (
    errors.DeadlineExceeded,
    errors.SlowConsumer,
    errors.RequestFailed,
    errors.RequestQuarantined,
    errors.InternalError,
)
# Codes that are not the reason in lower case.
_CODES: Mapping[type[errors.ServingError], str] = {
    errors.Overloaded: "rate_limit_exceeded",
    errors.QuotaExceeded: "rate_limit_exceeded",
}
# What the runtime calls fields that have other names here; "sampling." is left out everywhere.
_NAMES: Mapping[str, str] = {
    "text": "prompt",
    "tokens.ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.messages.role": "messages.role",
    "chat.messages.fields_json": "messages",
    "chat.messages.content": "messages.content",
    "chat.tools_json": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.max_reasoning_tokens": "max_reasoning_tokens",
    "chat.tool_name": "tool_choice.function.name",
    "chat.template_arguments_json": "chat_template_kwargs",
    "chat.template": "chat_template",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "prompt_logprobs": "logprobs",
    "answer_prefix_tokens.ids": "answer_prefix_tokens",
}
# A field's name within a rule: words that are English too stay.
_FIELD = re.compile(r"[a-z]+(?:[._][a-z]+)+")


def status_of(error: errors.ServingError) -> int:
    """Return the HTTP status of an error; a class without a row is a bug and gets 500."""
    return TABLE.get(type(error), (500, INTERNAL))[0]


def with_names(
    error: errors.RequestError, names: Callable[[str], str] = str
) -> errors.RequestError:
    """Return a refusal whose field and rule have the names that its caller wrote.

    Args:
        error: changed in place: a class of errors may have any parameters.
        names: gives the name of a field in this request, by the name that other requests have for it.
    """

    def written(field: str) -> str:
        name = _NAMES.get(field, field.removeprefix("sampling."))
        # A request has other names for its own log-probabilities, not for those of prompts.
        return name if field == "prompt_logprobs" else names(name)

    error.field = written(error.field)
    error.rule = _FIELD.sub(lambda found: written(found[0]), error.rule)
    error.args = (f"{error.field}: {error.rule}",)
    return error


def body_of(error: errors.ServingError) -> bytes:
    """Return the JSON of an error, of an answer's body and of an event alike."""
    field = None
    if isinstance(error, errors.RequestError):
        field = with_names(error).field
    found = {
        "message": str(error),
        "type": TABLE.get(type(error), (500, INTERNAL))[1],
        "param": field,
        "code": _CODES.get(type(error), error.reason.lower()),
    }
    return json.dumps({"error": found}, separators=(",", ":")).encode()


def headers_of(error: errors.ServingError) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell clients whether and when to try again, and to close what is not read to its end."""
    headers = [(b"content-type", b"application/json")]
    if (wait_s := retry_after_s(error)) is not None:
        headers.append((b"retry-after-ms", b"%d" % int(wait_s * 1000)))
        headers.append((b"retry-after", b"%d" % max(1, round(wait_s))))
    elif isinstance(error, _NEVER_RETRIED):
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, errors.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, (errors.Unauthenticated, BodyTooLarge, SlowBody)):
        # What is left of the body is not worth reading.
        headers.append((b"connection", b"close"))
    return headers
