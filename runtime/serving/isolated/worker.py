"""The server's side of an engine in a process of its own: a worker that survives its engine.

When the engine's process ends or hangs, another one is started. Requests that have emitted nothing are given to it, the
others end with ``EngineRestart``: their tokens were sent, and what followed is lost. Invariant:

* K1  Every request that ``submit`` took gets exactly one terminal event, whatever becomes of the process.
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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from outrider.engines.base import EngineError
from outrider.runtime.core.errors import Draining, EngineRestart, Overloaded
from outrider.runtime.core.params import Event, Failed, Progressed, RequestSpec
from outrider.runtime.core.request import Speculation
from outrider.runtime.loop.outbox import Deliver
from outrider.runtime.loop.totals import Pulse, WorkerSnapshot
from outrider.runtime.serving.isolated.messages import (
    Cancel,
    Changed,
    Drain,
    Open,
    Opened,
    Refused,
    Start,
    Stop,
    Submit,
    ToChild,
    Told,
)
from outrider.runtime.serving.opening import ServeOptions
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.tokenizer import TokenizersCodec

MOST_TRIES = 2
"""Engines that a request may be given to: one that was aboard when two of them died may be why."""
MOST_VAIN_STARTS = 5
"""Engines in a row that emitted nothing; then the server gives up."""
LONGEST_PAUSE_S = 60.0
STOP_GRACE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Aboard:
    """A request that awaits its terminal event."""

    spec: RequestSpec
    deliver: Deliver
    num_output: int = 0
    num_tries: int = 1


class _Engine:
    """One process and the pipe to it; ``send`` never waits for the process."""

    def __init__(self, root: Path, options: ServeOptions) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", "-m", "outrider.runtime.serving.isolated.child")
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[ToChild | None] = queue.SimpleQueue()
        self.has_emitted = False
        sender = threading.Thread(target=self._send_all, name="outrider-engine-sender", daemon=True)
        sender.start()
        options = replace(options, stage=nullcontext)
        self.send(Open(root, options, sys.getswitchinterval()))

    def send(self, message: ToChild) -> None:
        """Have a message sent, if the process still reads."""
        self._outgoing.put(message)

    def end(self) -> None:
        """Kill the process, if it still runs, and free the pipe."""
        self.process.kill()
        self.process.wait()
        self._outgoing.put(None)
        self.connection.close()

    def _send_all(self) -> None:
        # The pipe breaks when the process ends; whoever reads from it sees to the rest.
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self.connection.send(message)


class IsolatedWorker:
    """A worker in another process, with the methods of ``runtime.loop.worker.Worker`` that serving calls.

    Args:
        root: folder of the bundle.
        options: to open it with.

    Attributes:
        opened: what the first process said of the bundle.
        pulse: signs of life; a step is what happens between two messages while requests are aboard.
        num_restarts: processes that another one has replaced.
        has_changed_model: whether a file that engines compute from has changed.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """

    def __init__(self, root: Path, options: ServeOptions) -> None:
        self._root = root
        self._options = options
        # Guards the requests, and which process they are given to.
        self._lock = threading.RLock()
        self._aboard: dict[str, _Aboard] = {}
        self._calls: list[Callable[[], None]] = []
        self._is_draining = self._is_stopping = self.is_ready = False
        self._num_vain = 0
        self._told_s = 0.0
        self._thread: threading.Thread | None = None
        self.pulse = Pulse()
        self.num_restarts = 0
        self.has_changed_model = False
        self._engine, self.opened = self._open()
        # Callers wait for the next engine, so it measures nothing that the first one has measured.
        self._options = replace(options, refreshes_costs=False, takes_unsettled_costs=True)
        self._snapshot = self.opened.snapshot

    def start(self) -> None:
        """Have the engine run steps, and listen to it, until ``stop``."""
        self._engine.send(Start())
        self.is_ready = True
        self._thread = threading.Thread(target=self._listen, name="outrider-engine", daemon=True)
        self._thread.start()

    def after_step(self, call: Callable[[], None]) -> None:
        """Call something after each step's events; before ``start``."""
        self._calls.append(call)

    def submit(self, spec: RequestSpec, deliver: Deliver) -> None:
        """Give a request to the engine; a refusal comes as its terminal event.

        Raises:
            EngineRestart: there is no engine at present.
            Draining: the server is shutting down.
        """
        with self._lock:
            if self._is_draining:
                raise Draining
            if not self.is_ready:
                raise EngineRestart
            if not self._aboard:
                self.pulse.begin()
                self._told_s = time.monotonic()
            self._aboard[spec.internal_id] = _Aboard(spec, deliver)
            self.pulse.reads_prompt = True
            self._engine.send(Submit(spec))

    def check_room(self, num_slots: int, num_tokens: int) -> None:
        """Refuse a request for which the engine's queue has clearly no room; the engine itself counts exactly.

        Raises:
            EngineRestart: there is no engine at present.
            Draining: the server is shutting down.
            Overloaded: the queue is full.
        """
        config = self.opened.config
        with self._lock:
            if self._is_draining:
                raise Draining
            if not self.is_ready:
                raise EngineRestart
            queued = [*self._aboard.values()][self.opened.snapshot.num_slots :]
            num_tokens += sum(len(one.spec.prompt_tokens) for one in queued)
        if len(queued) >= config.max_queued or num_tokens > config.max_queued_tokens:
            raise Overloaded(config.retry_after_s)

    def cancel(self, internal_id: str, error: Exception) -> None:
        """End a request with ``error`` before the next step; one that has ended is left alone."""
        with self._lock:
            if self.is_ready:
                self._engine.send(Cancel(internal_id, error))
            elif (one := self._aboard.pop(internal_id, None)) is not None:
                self._end(one, error)

    def is_queued(self, internal_id: str) -> bool:
        """Return whether a request waits for an engine; those that wait for a slot are the engine's to end."""
        with self._lock:
            return internal_id in self._aboard and not self.is_ready

    @property
    def default_speculation(self) -> Speculation:
        """How a request that asks for nothing in particular is drafted for."""
        return self.opened.speculation

    def snapshot(self) -> WorkerSnapshot:
        """Where the worker stood not long ago; callable from any thread."""
        return replace(self._snapshot, is_draining=self._is_draining)

    def drain(self) -> None:
        """Refuse new requests and end those without a slot; running ones go on."""
        with self._lock:
            self._is_draining = True
            if self.is_ready:
                self._engine.send(Drain())
            else:
                self._end_all(Draining())

    def stop(self, timeout_s: float) -> bool:
        """Drain, give running requests ``timeout_s``, end the rest, and end the engine.

        Returns:
            Whether everything ended; False where the engine had to be killed.
        """
        self.drain()
        with self._lock:
            self._is_stopping = True
            engine = self._engine
            engine.send(Stop(timeout_s))
        if self._thread is None:
            engine.end()
            return True
        self._thread.join(timeout_s + STOP_GRACE_S)
        has_ended = not self._thread.is_alive()
        engine.process.kill()
        self._thread.join(STOP_GRACE_S)
        return has_ended

    def restart(self, complaint: str) -> None:
        """End the engine, which hangs; called again it leaves it no choice."""
        engine = self._engine
        if self.is_ready:
            log.critical("the engine hangs: %s; starting another", complaint)
            self.is_ready = False
            # It prints where its threads are, and dies of it.
            engine.process.send_signal(signal.SIGABRT)
        else:
            engine.process.kill()

    def _open(self) -> tuple[_Engine, Opened]:
        """Start a process and wait until its bundle is open."""
        engine = _Engine(self._root, self._options)
        try:
            answer: object = engine.connection.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                engine.process.wait(STOP_GRACE_S)
            engine.end()
            code = engine.process.returncode
            raise EngineError(f"the engine's process ended with code {code}") from error
        if isinstance(answer, Opened):
            return engine, answer
        engine.end()
        assert isinstance(answer, Refused)
        raise answer.error

    def _listen(self) -> None:
        """Take what engines tell, one after the other, until ``stop`` or too many of them ended for nothing."""
        try:
            while True:
                with suppress(EOFError, OSError):
                    while True:
                        self._take(self._engine.connection.recv())
                self._engine.end()
                if self._is_stopping:
                    break
                log.error("the engine's process ended: %s", self._engine.process.returncode)
                self._lose()
                if not self._replace():
                    break
        except BaseException:  # nobody else would hear of it
            log.critical("the engine's listener ended", exc_info=True)
            self.pulse.has_died = True
        finally:
            with self._lock:
                self.is_ready = False
                self._end_all(EngineRestart())

    def _take(self, told: Told | Changed) -> None:
        if isinstance(told, Changed):
            self.has_changed_model = True
            return
        with self._lock:
            self._note_step(told)
            for internal_id, event in told.events:
                if (one := self._aboard.get(internal_id)) is None:
                    continue
                if isinstance(event, Progressed):
                    one.num_output += len(event.tokens)
                    self._engine.has_emitted = True
                else:
                    del self._aboard[internal_id]
                self._deliver(one, event)
            self.pulse.reads_prompt = any(one.num_output == 0 for one in self._aboard.values())
            if self._aboard:
                self.pulse.begin()
        for call in self._calls:
            call()

    def _note_step(self, told: Told) -> None:
        now_s = time.monotonic()
        is_step = self.pulse.is_stepping
        self.pulse.end(now_s - self._told_s if is_step else None)
        self._told_s = now_s
        self._snapshot = told.snapshot or self._snapshot

    def _lose(self) -> None:
        """End the requests that the next engine cannot serve, after one has ended."""
        with self._lock:
            self.is_ready = False
            self.pulse.end(None)
            for internal_id, one in list(self._aboard.items()):
                if one.num_output or one.num_tries >= MOST_TRIES or self._is_draining:
                    del self._aboard[internal_id]
                    self._end(one, EngineRestart(one.num_output))
                else:
                    one.num_tries += 1
        for call in self._calls:
            call()

    def _replace(self) -> bool:
        """Start another engine and give it the requests that wait; False where the server gives up."""
        if self._engine.has_emitted:
            self._num_vain = 0
        while not self._is_stopping:
            self._num_vain += 1
            if self._num_vain > MOST_VAIN_STARTS:
                log.critical("%d engines in a row served nobody; giving up", self._num_vain)
                self.pulse.has_died = True
                return False
            if self._num_vain > 1:
                time.sleep(min(2.0 ** (self._num_vain - 2), LONGEST_PAUSE_S))
            try:
                engine, opened = self._open()
            except Exception:  # whatever the bundle or the machine has become
                log.exception("another engine could not be started")
                continue
            with self._lock:
                self._engine, self._snapshot = engine, opened.snapshot
                self.pulse.took_s = Pulse().took_s
                self.num_restarts += 1
                engine.send(Start())
                for one in self._aboard.values():
                    engine.send(Submit(one.spec))
                if self._aboard:
                    self.pulse.begin()
                self._told_s = time.monotonic()
                self.is_ready = True
                if self._is_draining:
                    engine.send(Drain())
            log.warning("another engine is serving")
            return True
        return False

    def _end_all(self, error: Exception) -> None:
        for one in self._aboard.values():
            self._end(one, error)
        self._aboard.clear()
        for call in self._calls:
            call()

    def _end(self, one: _Aboard, error: Exception) -> None:
        self._deliver(one, Failed(error=error, num_output=one.num_output))

    @staticmethod
    def _deliver(one: _Aboard, event: Event) -> None:
        try:
            one.deliver(event)
        except Exception:  # a receiver that is gone must not end its neighbours
            log.exception("an event could not be delivered")


def open_isolated(root: Path, options: ServeOptions) -> Serving:
    """Return a bundle's worker with its engines in a process of their own, not yet started.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """
    worker = IsolatedWorker(root, options)
    opened = worker.opened
    return Serving(
        worker=worker,
        codec=TokenizersCodec(opened.tokenizer),
        model=opened.model,
        config=opened.config,
        limits=options.limits,
        certificate=opened.certificate,
        bit_equality=opened.bit_equality,
    )
