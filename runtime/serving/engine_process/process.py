"""The engine's process as the server's process sees it: started, spoken to over a pipe, ended, replaced.

Knows nothing of requests. ``Engines`` belongs to the thread that listens to them; only ``close`` may be called from
another one.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from outrider.engines.base import EngineError
from outrider.runtime.serving.engine_process.messages import (
    FromChild,
    Open,
    Opened,
    Refused,
    ToChild,
)
from outrider.runtime.serving.settings import ServeOptions

MOST_FAILED = 5
"""Engines in a row that served nobody and soon ended; then the server gives up."""
LONG_LIFE_S = 600.0
"""An engine that ends after so long has not failed, even if nobody asked it for anything."""
LEAST_OPEN_S = 300.0
"""Seconds that any engine but the first may take to open its bundle."""
MANY_FIRST = 4.0
"""It may take as many times as long as the first one did: that one's files may have been in memory already."""
FIRST_PAUSE_S = 1.0
"""Seconds before the start that follows a failed engine; doubled with every further one."""
END_GRACE_S = 10.0
"""Seconds in which a process that has closed its pipe ends by itself, and says with which code."""

log = logging.getLogger(__name__)


class EngineProcess:
    """One process and the pipe to it.

    Attributes:
        has_served: whether a request has had tokens or an answer from it; the listener notes it.
    """

    def __init__(self, root: Path, options: ServeOptions) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", "-m", "outrider.runtime.serving.engine_process.child")
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[ToChild | None] = queue.SimpleQueue()
        self._began_s = time.monotonic()
        self.has_served = False
        self._sender = threading.Thread(
            target=self._send_all, name="outrider-engine-sender", daemon=True
        )
        self._sender.start()
        options = replace(options, stage=nullcontext)
        self.send(Open(root, options, sys.getswitchinterval()))

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def has_failed(self) -> bool:
        """Whether the process served nobody and did not live long; asked once it has ended."""
        return not self.has_served and time.monotonic() - self._began_s < LONG_LIFE_S

    def opened(self, limit_s: float | None) -> Opened:
        """Wait until the bundle is open, and return what the process says of it.

        Args:
            limit_s: seconds to wait at most; None for ever.

        Raises:
            BundleError: the bundle does not fit its manifest.
            ConfigError: a setting cannot be used.
            EngineError: the process has ended, or not opened the bundle in time.
        """
        try:
            if not self._connection.poll(limit_s):
                raise EngineError(f"the engine's process did not open its bundle in {limit_s} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_GRACE_S)
            code = self._process.returncode
            raise EngineError(f"the engine's process ended with code {code}") from error
        if isinstance(answer, Opened):
            return answer
        assert isinstance(answer, Refused)
        raise answer.error

    def messages(self) -> Iterator[FromChild]:
        """What the process tells, until it ends."""
        with suppress(EOFError, OSError):
            while True:
                yield self._connection.recv()

    def send(self, message: ToChild) -> None:
        """Have a message sent, if the process still reads; never waits for it."""
        self._outgoing.put(message)

    def abort(self) -> None:
        """Have the process print where its threads are and die of it, if it still can."""
        self._process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        """Kill the process; callable from any thread."""
        self._process.kill()

    def end(self) -> int:
        """Kill the process, if it still runs, free the pipe, and return the exit code."""
        self._process.kill()
        code = self._process.wait()
        self._outgoing.put(None)
        # Nobody reads any more, so it ends at once; the pipe's number may be another pipe's afterwards.
        self._sender.join()
        self._connection.close()
        return code

    def _send_all(self) -> None:
        # The pipe breaks when the process ends; whoever reads from it sees to the rest.
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.send(message)


class Engines:
    """Starts engines of one bundle, one after the other.

    Args:
        root: folder of the bundle.
        options: to open it with.

    Attributes:
        has_given_up: whether too many engines in a row have failed.
    """

    def __init__(self, root: Path, options: ServeOptions) -> None:
        self._root = root
        self._options = options
        self._limit_s: float | None = None
        self._num_failed = 0
        self._is_closed = threading.Event()
        self._guard = threading.Lock()
        self._opening: EngineProcess | None = None  # guarded
        self.has_given_up = False

    def first(self) -> tuple[EngineProcess, Opened]:
        """Return the first engine with its bundle open.

        Raises:
            BundleError: the bundle does not fit its manifest.
            ConfigError: a setting cannot be used.
            EngineError: the process ended.
        """
        began_s = time.monotonic()
        engine = self._open()
        self._limit_s = max(LEAST_OPEN_S, MANY_FIRST * (time.monotonic() - began_s))
        # Callers wait for the next engine, so it measures nothing that the first one has measured.
        self._options = replace(self._options, refreshes_costs=False)
        return engine

    def next(self, ended: EngineProcess) -> tuple[EngineProcess, Opened] | None:
        """Return the engine that follows one that has ended; None after ``close``, and where the server gives up."""
        self._num_failed = self._num_failed + 1 if ended.has_failed else 0
        while self._num_failed < MOST_FAILED:
            if self._is_closed.wait(self._pause_s()):
                return None
            try:
                return self._open()
            except Exception:  # whatever the bundle or the machine has become
                if self._is_closed.is_set():
                    return None
                log.exception("another engine could not be started")
                self._num_failed += 1
        log.critical("%d engines in a row served nobody; giving up", self._num_failed)
        self.has_given_up = True
        return None

    def close(self) -> None:
        """Start no further engine, and kill one whose bundle is not open yet."""
        self._is_closed.set()
        with self._guard:
            if self._opening is not None:
                self._opening.kill()

    def _pause_s(self) -> float:
        return FIRST_PAUSE_S * 2.0 ** (self._num_failed - 1) if self._num_failed else 0.0

    def _open(self) -> tuple[EngineProcess, Opened]:
        with self._guard:
            if self._is_closed.is_set():
                raise EngineError("no engine is wanted any more")
            self._opening = engine = EngineProcess(self._root, self._options)
        try:
            return engine, engine.opened(self._limit_s)
        except BaseException:
            engine.end()
            raise
        finally:
            with self._guard:
                self._opening = None
