"""docs/observability.md says what servers tell: the table of metrics, and the fields of lines and spans."""

from __future__ import annotations

import re

from outrider.runtime.serving.accounting import _access_fields
from outrider.runtime.serving.observability.tracing import Ended, Times
from outrider.runtime.serving.requests.client import ClientIdentity

from scripts.list_metrics import PAGE, renewed
from tests.runtime.watched import Watched

TEXT = PAGE.read_text(encoding="utf-8")
# The one metric that is there with TLS alone.
OF_TLS = "outrider_tls_certificate_expiry_seconds"


def test_the_table_is_that_of_the_code():
    assert renewed(TEXT) == TEXT, "run python -m scripts.list_metrics"


def test_a_server_tells_what_the_table_says_and_nothing_else(watched: Watched):
    rows = dict(re.findall(r"^\| `(outrider_\w+)` \| (\w+) \|", TEXT, re.M))
    told = dict(re.findall(r"^# TYPE (outrider_\w+) (\w+)$", watched.scrape(), re.M))
    assert told.pop(OF_TLS) == "gauge" and OF_TLS.removeprefix("outrider_") in TEXT
    assert told.items() <= rows.items()
    of_encoders = {"read_seconds", "source_tokens_total", "num_requests_reading"}
    assert {name.removeprefix("outrider_") for name in rows.keys() - told.keys()} == of_encoders


def test_the_fields_of_access_lines_are_named():
    ended = Ended(
        outcome="admitted", code="OK", reason="length", first_token_s=0.0, times=Times(queued_s=0.0)
    )
    for name in (*_access_fields(ClientIdentity(), ended), "ms"):
        assert f"`{name}`" in TEXT, name
