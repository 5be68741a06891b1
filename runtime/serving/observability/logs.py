"""The server's log: lines for people or for machines, written beside the event loop, with the request they belong to.

Every line goes through a bounded queue to a thread of its own, so that nobody waits for a disk or for who reads a pipe.
Where the queue is full, lines are lost, and the next one that is not says how many. What strangers choose is bounded
where a line is made (``bounded``), and no character of it ends a line. Prompts and answers are in no line.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, Full, Queue
from types import TracebackType
from typing import TextIO

from outrider.runtime.serving.settings import LogOptions

MOST_QUEUED = 10_000
"""Lines that wait for a slow disk."""
CLOSE_S = 2.0
"""Seconds for what is queued to be written at the end."""
MOST_CHARACTERS = 128
"""Of a value that a stranger chooses."""
OURS = "outrider"
ACCESS = logging.getLogger("outrider.access")
"""A line of each request, once it has ended."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestNames:
    """What a request's lines are found by; filled in as it becomes known."""

    request_id: str = ""
    trace_id: str = ""


_NAMES: ContextVar[RequestNames] = ContextVar("names")


def begin_request() -> RequestNames:
    """Return the names of a request whose lines the present task writes from now on."""
    names = RequestNames()
    _NAMES.set(names)
    return names


def bounded(text: str) -> str:
    """Return a text that a stranger chose, cut to what a line takes of it."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


class JsonFormatter(logging.Formatter):
    """A line of JSON per record: time, level, logger, message, names of the request, further fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        values: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_names_of(record),
            **_fields_of(record),
        }
        if text := self._traceback(record):
            values["traceback"] = text
        return json.dumps(values, separators=(",", ":"), default=str)

    def _traceback(self, record: logging.LogRecord) -> str:
        if record.exc_info:
            return self.formatException(record.exc_info)
        return record.exc_text or ""


class ConsoleFormatter(logging.Formatter):
    """A line for people: time, level, message and, behind it, names and fields as NAME=VALUE; a traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or several with a traceback."""
        pairs = {**_names_of(record), **_fields_of(record)}
        behind = "".join(
            f"  {name}={value}" for name, value in pairs.items() if value not in ("", 0)
        )
        line = f"{_time_of(record)} {record.levelname:8} {record.getMessage()}{behind}"
        text = _printable(line)
        if record.exc_info:
            return f"{text}\n{self.formatException(record.exc_info)}"
        return f"{text}\n{record.exc_text}" if record.exc_text else text


class Logging:
    """A process's log from construction to ``close``, which writes what is queued; the interpreter's end closes it too.

    Args:
        options: how to log.
        stream: to write to; default: standard error.
    """

    def __init__(self, options: LogOptions, stream: TextIO | None = None) -> None:
        written = _Written(stream or _unlocked(sys.stderr))
        written.setFormatter(JsonFormatter() if options.format == "json" else ConsoleFormatter())
        self._handler = _Queued(written)
        self._root, self._ours = logging.getLogger(), logging.getLogger(OURS)
        self._before = (self._root.level, self._ours.level, self._root.handlers)
        level = logging.getLevelNamesMapping()[options.level.upper()]
        self._root.setLevel(max(level, logging.WARNING))
        self._root.handlers = [self._handler]
        self._ours.setLevel(level)
        self._hooks = (sys.excepthook, threading.excepthook)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
        logging.captureWarnings(True)

    def close(self) -> None:
        """Write what is queued, and leave logging as it was."""
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = self._hooks
        root_level, our_level, self._root.handlers = self._before
        self._root.setLevel(root_level)
        self._ours.setLevel(our_level)
        self._handler.close()


@contextmanager
def logged_stage(text: str) -> Iterator[None]:
    """Log that the block begins, and what it took."""
    log.info("%s ...", text)
    began_s = time.perf_counter()
    yield
    log.info("%s: %.1f s", text, time.perf_counter() - began_s)


class _Written(logging.Handler):
    """Writes lines for one thread alone: a lock would be kept for ever where nobody takes them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def createLock(self) -> None:  # noqa: N802  (the library's name)
        """Make none."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line."""
        try:
            self._stream.write(f"{self.format(record)}\n")
            self._stream.flush()
        except Exception:
            self.handleError(record)


def _unlocked(stream: TextIO) -> TextIO:
    """Return a stream to the same file without Python's buffer, whose lock the interpreter's end would wait for."""
    try:
        number = stream.fileno()
    except OSError:
        return stream
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115  (as long as the process)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


class _Listener(QueueListener):
    """Hands queued records to a handler in a thread that does not keep the process."""

    def end(self, timeout_s: float) -> None:
        """Let the thread end once all is written, and wait for that no longer than this."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None


class _Queued(QueueHandler):
    """Leaves records for a thread that writes them."""

    def __init__(self, written: logging.Handler) -> None:
        self._lines: Queue[logging.LogRecord] = Queue(MOST_QUEUED)
        super().__init__(self._lines)
        self._num_lost = 0
        self._is_open = True
        self._listener = _Listener(self._lines, written)
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record that holds on to nothing of the one who logs: texts alone."""
        prepared = copy(record)
        prepared.msg, prepared.args = record.getMessage(), None
        if record.exc_info:
            prepared.exc_text = logging.Formatter().formatException(record.exc_info)
            prepared.exc_info = None
        names = _NAMES.get(None)
        if names is not None:
            for name in ("request_id", "trace_id"):
                if not hasattr(record, name):
                    setattr(prepared, name, getattr(names, name))
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as lost."""
        try:
            if self._num_lost:
                text = f"{self._num_lost} lines of the log were lost"
                values = {"name": log.name, "levelno": logging.WARNING, "levelname": "WARNING"}
                self._lines.put_nowait(logging.makeLogRecord(values | {"msg": text}))
                self._num_lost = 0
            self._lines.put_nowait(record)
        except Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what is queued, for ``CLOSE_S`` at most; where the queue is full, its first lines are given up."""
        if self._is_open:
            self._is_open = False
            while self._lines.full():
                with suppress(Empty):
                    self._lines.get_nowait()
            with suppress(Full):
                self._listener.end(CLOSE_S)
        super().close()


def _names_of(record: logging.LogRecord) -> dict[str, str]:
    names = ("request_id", "trace_id")
    return {name: value for name in names if (value := getattr(record, name, ""))}


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _time_of(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def _printable(line: str) -> str:
    """Return a line in which nothing ends it or moves a terminal's cursor."""
    if line.isprintable():
        return line
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode()
        for one in line
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger(OURS).critical("uncaught", exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and told.exc_type is not SystemExit:
        _log_uncaught(told.exc_type, told.exc_value, told.exc_traceback)
