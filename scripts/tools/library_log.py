"""What ONNX Runtime logs as it opens and runs graphs; it writes that to stderr, and to nothing else."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import onnxruntime

# Severities: a warning tells of copies between host and device, a verbose line of kernels.
VERBOSE, WARNINGS = 0, 2
_MEMCPY_NODES = re.compile(r"(\d+) Memcpy nodes are added")


def num_memcpys(text: str) -> int:
    """Return how many nodes a log says were added to copy between host and device."""
    return sum(map(int, _MEMCPY_NODES.findall(text)))


class Log:
    """What libraries write to stderr."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file.fileno()
        self._place = 0

    def take(self) -> str:
        """Return what was written since the last call."""
        text = os.pread(self._file, os.fstat(self._file).st_size - self._place, self._place)
        self._place += len(text)
        return text.decode(errors="replace")


@contextmanager
def log_of_libraries() -> Iterator[Log]:
    """Take what is written to stderr."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Log(file)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def sessions_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """Let a function make the sessions, from the arguments of ``onnxruntime.InferenceSession`` and that class."""
    plain = onnxruntime.InferenceSession
    onnxruntime.InferenceSession = lambda *given, **named: make(plain, *given, **named)
    try:
        yield
    finally:
        onnxruntime.InferenceSession = plain
