"""Watches a served model: ends what is overdue, answers everybody where its worker is lost, and keeps health true."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health, health_pb2
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.request_handler import RequestHandler
from outrider.runtime.serving.supervision.notify import ALIVE, notify
from outrider.runtime.serving.supervision.watchdog import Watchdog

LIVENESS = "liveness"
"""A health name that stays SERVING while the server starts and drains, for liveness probes."""
WATCH_EVERY_S = 0.5
"""Seconds between two looks at the worker."""
FLUSH_S = 5.0
"""Seconds for streams to deliver their last status."""

log = logging.getLogger(__name__)


class Health:
    """What probes are told; NOT_SERVING until it is said otherwise.

    Args:
        readiness: told the same, for probes of other protocols than gRPC.
        names: of health that says whether requests are taken.
    """

    def __init__(self, readiness: ServerState, *names: str) -> None:
        self.servicer = health.aio.HealthServicer()
        self._readiness = readiness
        self._names = names

    async def begin(self) -> None:
        """Say that the process lives, and takes no requests yet."""
        await self.set_serving(False)
        await self._set(LIVENESS, True)

    async def set_serving(self, is_serving: bool) -> None:
        """Say whether requests are taken."""
        self._readiness.is_serving = is_serving
        for name in self._names:
            await self._set(name, is_serving)

    async def end(self) -> None:
        """Say that the process is to be ended."""
        await self.set_serving(False)
        await self._set(LIVENESS, False)

    async def _set(self, name: str, is_up: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self.servicer.set(name, states.SERVING if is_up else states.NOT_SERVING)


class Supervisor:
    """Watches one served model from its opening on.

    Args:
        serving: the model; its worker runs.
        handler: has its requests.
        health: is kept true.
        has_failed: set once the worker is lost for good, and everybody is answered.

    Attributes:
        is_draining: whether health stays NOT_SERVING, whatever the worker does.
    """

    def __init__(
        self,
        serving: LoadedModel,
        handler: RequestHandler,
        health: Health,
        has_failed: asyncio.Event,
    ) -> None:
        self._serving = serving
        self._handler = handler
        self._health = health
        self._has_failed = has_failed
        self.watchdog = Watchdog(serving.worker.heartbeat, serving.config.hang_s, serving.clock)
        self._is_serving = True
        self.is_draining = False
        self._tasks = [self._watched(self._watch())]
        if serving.mapped is not None:
            self._tasks.append(self._watched(self._watch_files(serving.mapped)))

    async def look(self) -> None:
        """End requests that are overdue; where the worker hangs or is dead, answer everybody and set ``has_failed``."""
        self._handler.end_overdue()
        complaint = self.watchdog.complaint()
        if complaint is None or self._serving.worker.restart(complaint):
            await self._follow()
            return
        if self._has_failed.is_set():
            return
        log.critical("%s; ending all requests and the process", complaint)
        self._handler.fail()
        await self._health.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._handler.wait_idle()
        log_threads()
        self._has_failed.set()

    async def stop(self) -> None:
        """Watch no longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while not self._has_failed.is_set():
            await asyncio.sleep(WATCH_EVERY_S)
            await self.look()
            notify(ALIVE)

    async def _follow(self) -> None:
        """Report NOT_SERVING while there is no engine, or its files have changed."""
        worker = self._serving.worker
        if worker.has_changed_model:
            self._handler.refuse_changed_model()
        is_serving = worker.is_ready and not worker.has_changed_model
        if is_serving == self._is_serving or self.is_draining:
            return
        self._is_serving = is_serving
        await self._health.set_serving(is_serving)

    async def _watch_files(self, bundle: Bundle) -> None:
        """Turn NOT_SERVING and refuse new requests once a file that engines compute from has changed."""
        try:
            while True:
                bundle.check_unchanged()
                await asyncio.sleep(self._serving.file_watch_s)
        except BundleError as error:
            log.error("no longer serving: %s", error)
            self._handler.refuse_changed_model()
            await self._health.set_serving(False)

    def _watched(self, watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return watched(watch, self._has_failed)


def log_threads() -> None:
    """Log where each thread is, innermost call first; nobody waits for whoever reads the log."""
    names = {one.ident: one.name for one in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        log.critical("thread %s:", names.get(ident, ident))
        for call, line in traceback.walk_stack(frame):
            log.critical("  %s:%d in %s", call.f_code.co_filename, line, call.f_code.co_name)


def watched(watch: Coroutine[Any, Any, None], has_failed: asyncio.Event) -> asyncio.Task[None]:
    """Return a task that sets ``has_failed`` where it raises: nobody else would hear of it."""

    def note_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a watch failed; ending the process", exc_info=error)
            has_failed.set()

    task = asyncio.create_task(watch)
    task.add_done_callback(note_end)
    return task
