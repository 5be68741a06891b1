"""The process that tries strangers' grammars, each in a fork of its own that bounds itself.

It loads a tokenizer once. A grammar is compiled in a fork, which the kernel ends at its bounds of time, memory and
stack; nothing of it is left, and the next one finds the process as it was. One thread, no numpy: forks are cheap and
safe. Ends when its pipe is closed.

Messages are JSON: first the tokenizer, answered by "" or by why it cannot be used; then grammars, answered likewise.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider.runtime.grammar.library import GrammarError, compiled, open_tokenizer

STACK_BYTES = 4 << 20
"""Half of what a thread of the server has: what is nested too deep ends here."""
TOO_LONG = "takes too long to compile"
TOO_LARGE = "needs too much memory to compile"
NO_TEXT = "allows no text"


def main(descriptor: int) -> None:
    """Answer the messages of an open socket until it is closed."""
    # Whoever started this process ends it; a terminal's Ctrl-C is meant for him.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    with suppress(EOFError, OSError):
        opening = json.loads(connection.recv_bytes())
        try:
            tokenizer = open_tokenizer(
                opening["tokenizer"], opening["vocab_size"], opening["end_ids"]
            )
        except ValueError as error:
            connection.send_bytes(str(error).encode() or b"unreadable")
            return
        connection.send_bytes(b"")
        while True:
            connection.send_bytes(_tried(tokenizer, json.loads(connection.recv_bytes())))


def _tried(tokenizer: Any, asked: Mapping[str, Any]) -> bytes:
    """Return why a grammar cannot be used, found out in a fork; empty where it can."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _bound(asked["limit_s"], asked["limit_bytes"])
            os.write(writing, b"+" + _judged(tokenizer, asked))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        return told[1:]
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return (TOO_LONG if is_late else TOO_LARGE).encode()


def _bound(limit_s: float, limit_bytes: int) -> None:
    """Have the kernel end this process at its bounds, quietly."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Of the processor: what a grammar takes does not depend on who else computes.
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Data alone: address space that is merely reserved takes no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (limit := _data_bytes() + limit_bytes, limit))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    # What cannot allocate says so at length.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _data_bytes() -> int:
    """Return the bytes of data that this process has."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _judged(tokenizer: Any, asked: Mapping[str, Any]) -> bytes:
    try:
        matcher = compiled(
            tokenizer,
            asked["kind"],
            asked["text"],
            allows_whitespace=asked["allows_whitespace"],
            made_of=asked["made_of"],
        )
    except GrammarError as error:
        return str(error).encode()
    # The first mask is a part of what compiling costs.
    matcher.compute_bitmask()
    return NO_TEXT.encode() if matcher.is_error() else b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
