"""The table of errors: every one of the runtime has a status, and says whether to come back."""

from __future__ import annotations

import json

import pytest
from outrider.runtime.core import errors
from outrider.runtime.serving.http.errors import TABLE, body_of, headers_of, status_of
from outrider.runtime.serving.status import STATUS

RETRIED_BY_CLIENTS = (408, 409, 429, *range(500, 600))


def test_every_error_of_the_runtime_has_a_row() -> None:
    assert {*STATUS} <= {*TABLE}
    assert 409 not in [status for status, _ in TABLE.values()]


@pytest.mark.parametrize(
    ("error", "is_retried", "wait"),
    [
        (errors.Overloaded(2.5), True, b"2500"),
        (errors.QuotaExceeded("x", 0.25), True, b"250"),
        (errors.Draining(), True, b"1000"),
        (errors.QueueTimeout(30.0), True, None),
        (errors.DeadlineUnreachable(), True, None),
        (errors.DeadlineExceeded(3), False, None),
        (errors.RequestFailed("id"), False, None),
        (errors.RequestQuarantined("id"), False, None),
        (errors.InternalError("id"), False, None),
        (errors.DuplicateRequestId(), False, None),
        (errors.RequestError("x", "must"), False, None),
        (errors.Unauthenticated(), False, None),
    ],
)
def test_clients_come_back_where_that_helps(error, is_retried: bool, wait) -> None:
    headers = dict(headers_of(error))
    is_status_retried = status_of(error) in RETRIED_BY_CLIENTS
    assert (is_status_retried and headers.get(b"x-should-retry") != b"false") is is_retried
    assert headers.get(b"retry-after-ms") == wait


def test_a_field_has_the_name_that_it_has_in_this_protocol() -> None:
    error = errors.RequestError("sampling.temperature", "must be 0")
    found = json.loads(body_of(error))["error"]
    assert (found["param"], found["message"]) == ("temperature", "temperature: must be 0")
    found = json.loads(body_of(errors.ContextTooLong("chat", "long", limit=1, given=2)))["error"]
    assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")
    rule = "needs chat.tools_json or sampling.top_k, and text of e.g. this"
    found = json.loads(body_of(errors.RequestError("chat.tools_json", rule)))["error"]
    assert found["message"] == "tools: needs tools or top_k, and text of e.g. this"
