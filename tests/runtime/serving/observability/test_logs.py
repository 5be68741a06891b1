"""The server's log: each line whole, with its request, in time, and without what a stranger may not put there."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from outrider import CallError
from outrider.runtime.core.errors import ConfigError, Unauthenticated
from outrider.runtime.serving.observability import logs
from outrider.runtime.serving.observability.logs import (
    Logging,
    begin_request,
    logged_stage,
)
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.settings import FORMATS, LogOptions

log = logging.getLogger("outrider.somewhere")
PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@contextmanager
def logging_to(stream: io.StringIO, **options: Any) -> Iterator[None]:
    made = Logging(LogOptions(**options), stream)
    try:
        yield
    finally:
        made.close()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_json_has_time_level_logger_message_and_fields():
    with logging_to(stream := io.StringIO(), format="json"):
        log.info("%d things", 3, extra={"fields": {"ms": 1.5}})
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "outrider.somewhere",
        "message": "3 things",
        "ms": 1.5,
    }


def test_a_line_for_people_is_one_line_whatever_is_in_it():
    with logging_to(stream := io.StringIO()):
        log.warning("a\nb\x1b[31m", extra={"fields": {"key": "x\r", "none": ""}})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING  a\\nb\\x1b[31m  key=x\\r")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_traceback_is_told_with_its_line(kind: str):
    with logging_to(stream := io.StringIO(), format=kind):
        try:
            raise KeyError("gone")
        except KeyError:
            log.exception("it failed")
    text = lines(stream)[0]["traceback"] if kind == "json" else stream.getvalue()
    assert "Traceback" in text and "KeyError: 'gone'" in text


def test_levels_are_of_our_loggers_and_others_warn():
    with logging_to(stream := io.StringIO(), format="json", level="debug"):
        log.debug("ours")
        logging.getLogger("another").info("theirs")
        logging.getLogger("another").warning("theirs")
    assert [(one["logger"], one["level"]) for one in lines(stream)] == [
        ("outrider.somewhere", "debug"),
        ("another", "warning"),
    ]
    with logging_to(stream := io.StringIO(), level="error"):
        log.warning("nothing")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("options", "key"), [({"format": "xml"}, "log_format"), ({"level": "loud"}, "log_level")]
)
def test_unknown_names_are_refused(options: dict[str, str], key: str):
    with pytest.raises(ConfigError, match=f"{key}: must be one of"):
        LogOptions(**options)


def test_what_nobody_caught_is_a_line_too():
    with logging_to(stream := io.StringIO(), format="json"):
        thread = threading.Thread(target=lambda: [][1])
        thread.start()
        thread.join()
        sys.excepthook(ValueError, ValueError("why"), None)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
    thread_line, main_line, warning = lines(stream)
    assert "IndexError" in thread_line["traceback"] and thread_line["level"] == "critical"
    assert "ValueError: why" in main_line["traceback"]
    assert "careful" in warning["message"] and warning["logger"] == "py.warnings"


def test_a_stage_says_that_it_begins_and_what_it_took():
    with logging_to(stream := io.StringIO(), format="json"), logged_stage("measuring"):
        pass
    first, last = (one["message"] for one in lines(stream))
    assert first == "measuring ..." and last.startswith("measuring: 0.")


class Stuck(io.StringIO):
    """A disk that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.has_begun = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.has_begun.set()
        assert self.go.wait(20)
        return super().write(text)


def test_nobody_waits_for_a_disk_and_lost_lines_are_counted(monkeypatch):
    monkeypatch.setattr(logs, "MOST_QUEUED", 4)
    stream = Stuck()
    with logging_to(stream, format="json"):
        log.info("first")
        assert stream.has_begun.wait(20)
        for number in range(10):
            log.info("%d", number)
        stream.go.set()
        logging.getLogger().handlers[0]._lines.join()
        log.info("after")
    said = [one["message"] for one in lines(stream)]
    assert said == ["first", "0", "1", "2", "3", "6 lines of the log were lost", "after"]


def test_an_exit_writes_what_is_queued():
    code = (
        "import logging; from outrider.runtime.serving.observability.logs import Logging, LogOptions\n"
        "Logging(LogOptions(format='json'))\n"
        "for one in range(200): logging.getLogger('outrider.x').info('%d', one)\n"
        "raise ValueError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["message"] for one in told] == [*map(str, range(200)), "uncaught"]
    assert done.returncode == 1


@pytest.mark.parametrize("end", ["made.close()", "logging.shutdown()", ""])
def test_a_pipe_that_nobody_reads_keeps_no_process(end: str):
    code = (
        "import logging; from outrider.runtime.serving.observability import logs\n"
        "logs.CLOSE_S = 0.1\n"
        "made = logs.Logging(logs.LogOptions())\n"
        "for one in range(3000): logging.getLogger('outrider.x').info('x' * 200)\n"
        f"{end}\n"
    )
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen([sys.executable, "-c", code], stderr=writer)
        try:
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
    finally:
        os.close(reader)
        os.close(writer)


async def test_every_request_has_a_line_and_no_line_has_a_text(start):
    with logging_to(stream := io.StringIO(), format="json"):
        async with start(has_access_lines=True) as run:
            options = {"max_tokens": 5, "temperature": 0.0}
            named = {"request_id": "one", "metadata": PARENT}
            async for _ in run.client.generate("secret", **options, **named):
                pass
            with pytest.raises(CallError):
                async for _ in run.client.generate("secret", stop=["secret"] * 99):
                    pass
    done, refused = (one for one in lines(stream) if one["logger"] == "outrider.access")
    assert done.pop("ms") >= done.pop("first_token_ms") >= 0.0 and done.pop("queue_ms") >= 0.0
    del done["time"]
    assert done == {
        "level": "info",
        "logger": "outrider.access",
        "message": "request ended",
        "request_id": "one",
        "trace_id": "a" * 32,
        "dialect": "outrider.v1",
        "method": "Generate",
        "tenant": "",
        "key": "",
        "peer": "127.0.0.1",
        "outcome": "admitted",
        "code": "OK",
        "reason": "length",
        "prompt_tokens": 6,
        "output_tokens": 5,
    }
    assert (refused["outcome"], refused["reason"]) == ("refused", "INVALID_PARAMETER")
    assert "secret" not in stream.getvalue()


async def test_access_lines_are_left_out_where_nobody_wants_them(start):
    with logging_to(stream := io.StringIO(), format="json"):
        async with start() as run:
            async for _ in run.client.generate("a", max_tokens=1):
                pass
    assert "outrider.access" not in stream.getvalue()


async def test_the_name_of_a_method_that_does_not_exist_is_cut(start):
    with logging_to(stream := io.StringIO(), format="json"):
        async with start(has_access_lines=True) as run:
            caller = ClientIdentity(peer=f"ipv4:{'1' * 5000}:9", tenant="t" * 5000)
            run.server.readiness.accounting.refused(f"/{'x' * 5000}", caller, Unauthenticated())
    (line,) = (one for one in lines(stream) if one["logger"] == "outrider.access")
    assert max(len(line[name]) for name in ("method", "peer", "tenant")) < 200


def test_lines_of_a_request_have_its_names():
    with logging_to(stream := io.StringIO(), format="json"):
        names = begin_request()
        names.request_id, names.trace_id = "mine", "b" * 32
        log.info("within")
        log.info("of another", extra={"request_id": "other"})
    first, second = lines(stream)
    assert (first["request_id"], first["trace_id"]) == ("mine", "b" * 32)
    assert second["request_id"] == "other"
