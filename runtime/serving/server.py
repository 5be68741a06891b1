"""Builds the gRPC server around a bundle, and shuts it down without losing an answer.

Health is NOT_SERVING until the worker runs. After SIGTERM the server turns NOT_SERVING, waits for load balancers to
notice, refuses new requests, lets running ones finish up to a limit, and cuts off the others. A second SIGTERM ends
the present wait.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.doors.addresses import UNIX
from outrider.runtime.serving.doors.audit import AuditLog
from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.doors.gate import Gate
from outrider.runtime.serving.doors.scrape import MetricsListener
from outrider.runtime.serving.frontend import Frontend
from outrider.runtime.serving.isolated.worker import open_isolated
from outrider.runtime.serving.ledger import Caller, Ledger
from outrider.runtime.serving.memory import give_back_regularly, use_few_arenas
from outrider.runtime.serving.opening import ServeOptions, open_serving, settle_loaded
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.v1.service import SERVICE, InferenceService
from outrider.runtime.serving.watch.metrics import Metrics
from outrider.runtime.serving.watchdog import Watchdog

# The worker's thread asks for the interpreter after every engine call, several times in a step, and
# waits this long while the event loop is busy. Python's 5 ms are a whole step: on two busy cores a
# stream through gRPC ran 12 % (batch 1) and 15 % (batch 8) faster with less.
SWITCH_INTERVAL_S = 2e-4
# A health name that stays SERVING while draining, for liveness probes.
LIVENESS = "liveness"
# Seconds for open health watches, for streams to deliver their last status, and for a stuck engine.
CLOSE_GRACE_S = 1.0
FLUSH_S = 5.0
GUARD_S = 10.0
# Seconds between two looks at the worker.
WATCH_EVERY_S = 0.5
GUARD_EXIT_CODE = 70

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # A second server on the same port would bind silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 256),
    # A connection that does not say what it wants; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Of a call's metadata: refused by chance from the first on, and surely from the second.
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 10 * 60_000),
    ("grpc.max_connection_idle_ms", 10 * 60_000),
    # Dead peers must not hold their slots for the two hours of the default.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # With the same options at the client, a stalled reader stops the writer within some 100 KiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
)

log = logging.getLogger(__name__)


class Server:
    """A gRPC server over one ``Serving``, behind ``doors``; owns its worker from ``start`` to ``drain``."""

    def __init__(
        self,
        serving: Serving,
        metrics: Metrics | None = None,
        doors: Doors | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._doors = doors or Doors()
        self._serving = serving
        self._ledger = Ledger(
            self.metrics, serving.clock, audit=audit, is_listed=self._doors.is_listed
        )
        self._frontend = Frontend(serving, self._ledger)
        service = InferenceService(serving, self._frontend)
        self._health = health.aio.HealthServicer()
        options = (
            *SERVER_OPTIONS,
            ("grpc.max_allowed_incoming_connections", serving.config.max_connections),
            ("grpc.max_receive_message_length", serving.limits.max_message_bytes),
        )
        gate = Gate(
            self._doors.authenticator,
            has_open_health=self._doors.options.has_open_health,
            refused=self._note_refusal,
        )
        self._server = grpc.aio.server(interceptors=(gate,), options=options)
        self._server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._giving_back: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._file_watch: asyncio.Task[None] | None = None
        self._door_watch: asyncio.Task[None] | None = None
        self._watch_worker()
        self._watchdog = Watchdog(serving.worker.pulse, serving.config.hang_s, serving.clock)
        self._watching: asyncio.Task[None] | None = None
        self.has_failed = asyncio.Event()
        self._is_serving, self._is_draining = True, False

    async def start(self, *addresses: str) -> int:
        """Listen, start the worker, report SERVING, and return the first address' port; 0 for a Unix socket.

        Raises:
            ConfigError: an address cannot be bound.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        ports = [self._doors.listen(self._server, address) for address in addresses]
        await self._server.start()
        self._giving_back = asyncio.create_task(give_back_regularly())
        self._serving.worker.start()
        self._frontend.set_ready()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._watching = self._watched(self._watch())
        if self._serving.mapped is not None:
            self._file_watch = self._watched(self._watch_files(self._serving.mapped))
        self._door_watch = self._watched(self._doors.watch())
        return ports[0]

    def _watched(self, watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task that sets ``has_failed`` where it raises: nobody else would hear of it."""

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.critical("a watch failed; ending the process", exc_info=error)
                self.has_failed.set()

        task = asyncio.create_task(watch)
        task.add_done_callback(note_end)
        return task

    async def _watch(self) -> None:
        while not self.has_failed.is_set():
            await asyncio.sleep(WATCH_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """End requests that are overdue; where the worker hangs or is dead, answer everybody and set ``has_failed``."""
        self._frontend.end_overdue()
        complaint = self._watchdog.complaint()
        if complaint is None or self._serving.worker.restart(complaint):
            await self._follow()
            return
        if self.has_failed.is_set():
            return
        log.critical("%s; ending all requests and the process", complaint)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self._frontend.fail()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._wait_or_hurry(self._frontend.wait_idle(), FLUSH_S)
        self.has_failed.set()

    async def _follow(self) -> None:
        """Report NOT_SERVING while there is no engine, or its files have changed."""
        worker = self._serving.worker
        if worker.has_changed_model:
            self._frontend.refuse_changed_model()
        is_serving = worker.is_ready and not worker.has_changed_model
        if is_serving == self._is_serving or self._is_draining:
            return
        self._is_serving = is_serving
        states = health_pb2.HealthCheckResponse
        await self._set_health(states.SERVING if is_serving else states.NOT_SERVING)

    async def abandon(self) -> None:
        """Close the listener after ``has_failed``; the worker stays as it is."""
        await self._server.stop(CLOSE_GRACE_S)

    def hurry(self) -> None:
        """End the waits of a running drain."""
        self._hurry.set()

    async def drain(self) -> int:
        """Shut down without losing an answer.

        Returns:
            The number of streams cut short; more than 0, too, where the worker hangs or is dead.
        """
        if self._file_watch is not None:
            self._file_watch.cancel()
        config, worker = self._serving.config, self._serving.worker
        self._is_draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._wait_or_hurry(self._hurry.wait(), config.lb_delay_s)
        self._frontend.close_admission()
        worker.drain()
        await self._wait_or_hurry(self._frontend.wait_idle(), config.drain_timeout_s)
        has_stopped = await asyncio.to_thread(worker.stop, 0.0)
        if not has_stopped:
            log.error("a step is stuck in the engine")
        await self._wait_or_hurry(self._frontend.wait_idle(), FLUSH_S)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._server.stop(CLOSE_GRACE_S)
        if self._serving.grammars is not None:
            await asyncio.to_thread(self._serving.grammars.close)
        for task in (self._giving_back, self._door_watch):
            if task is not None:
                task.cancel()
        return self._frontend.num_cut + (not has_stopped) + self.has_failed.is_set()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def _watch_files(self, bundle: Bundle) -> None:
        """Turn NOT_SERVING and refuse new requests once a file that engines compute from has changed."""
        try:
            while True:
                bundle.check_unchanged()
                await asyncio.sleep(self._serving.file_watch_s)
        except BundleError as error:
            log.error("no longer serving: %s", error)
            self._frontend.refuse_changed_model()
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _wait_or_hurry(self, waiting: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        """Wait for something, at most ``timeout_s``, or until ``hurry`` is called."""
        tasks = {asyncio.ensure_future(waiting), asyncio.ensure_future(self._hurry.wait())}
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_refusal(
        self, method: str, peer: str, error: ServingError, identity: Identity | None
    ) -> None:
        caller = Caller(peer=peer)
        if identity is not None:
            caller = replace(caller, tenant=identity.tenant, key=identity.key)
        self._ledger.refused(method.removeprefix(f"/{SERVICE}/"), caller, error)

    def _watch_worker(self) -> None:
        worker = self._serving.worker
        snapshot = worker.snapshot
        watch = self.metrics.watch
        watch("num_requests_running", "Holding a slot", lambda: snapshot().num_running)
        watch("num_requests_waiting", "Waiting for a slot", lambda: snapshot().num_queued)
        watch("slots_total", "Slots", lambda: snapshot().num_slots)
        watch("slots_free", "Free slots", lambda: snapshot().num_free_slots)
        watch("engine_restarts", "Engines that another has replaced", lambda: worker.num_restarts)
        watch("engine_steps", "Steps run", lambda: snapshot().step_count)
        if self._serving.model.max_source:
            self.metrics.watch_reads(snapshot)
        if self._serving.config.prefix_cache_bytes:
            self.metrics.watch_prefixes(snapshot)
        self.metrics.watch_control(lambda: snapshot().control)
        watch("streams", "Open streams", lambda: self._frontend.num_streams)


async def serve(root: Path, options: ServeOptions) -> int:
    """Serve a bundle until SIGTERM or SIGINT, and return the exit code: 0, or 1 where streams were cut or it hung.

    Where the worker hangs or is dead, the process ends with ``GUARD_EXIT_CODE``: no return from a hung library.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_few_arenas()
    metrics = Metrics()
    doors, addresses, listener = open_doors(options, metrics)
    audit = None if options.audit_log is None else AuditLog(options.audit_log)
    opened = (
        open_isolated(root, options) if options.isolates_engine else open_serving(root, options)
    )
    server = Server(opened, metrics, doors, audit)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: server.hurry() if stop.is_set() else stop.set())
    settle_loaded()
    port = await server.start(*addresses)
    if options.port_file is not None:
        unfinished = options.port_file.with_name(options.port_file.name + ".new")
        unfinished.write_text(f"{port}\n", encoding="utf-8")
        unfinished.replace(options.port_file)
    print(f"serving on port {port}" if port else f"serving on {addresses[0]}", flush=True)
    failing = asyncio.create_task(server.has_failed.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        await server.abandon()
        logging.shutdown()
        os._exit(GUARD_EXIT_CODE)
    failing.cancel()
    _guard(options.config)
    num_cut = await server.drain()
    if listener is not None:
        listener.close()
    return 1 if num_cut else 0


def open_doors(
    options: ServeOptions, metrics: Metrics
) -> tuple[Doors, list[str], MetricsListener | None]:
    """Return the doors, addresses to listen on that they allow, and what answers scrapes from now on.

    Raises:
        ConfigError: a file or an address cannot be used.
    """
    failed = metrics.reload_failures
    doors = Doors(options.doors, lambda name: failed.labels(file=name).inc())
    addresses = [options.address]
    if options.socket_path is not None:
        addresses.append(f"{UNIX}{options.socket_path}")
    for address in addresses:
        doors.check("host", address)
    if (certificate := doors.certificate) is not None:
        metrics.watch(
            "tls_certificate_expiry_seconds",
            "Until the certificate ends",
            lambda: certificate().ends_s - time.time(),
        )
    listener = None
    if options.metrics_address is not None:
        listener = MetricsListener(
            options.metrics_address,
            metrics.registry,
            doors,
            lambda error: metrics.refused.labels(reason=error.reason).inc(),
        )
    return doors, addresses, listener


def _guard(config: ServerConfig) -> None:
    """End the process even if the drain hangs."""
    total_s = config.lb_delay_s + config.drain_timeout_s + FLUSH_S + CLOSE_GRACE_S
    timer = threading.Timer(total_s + GUARD_S, os._exit, args=(GUARD_EXIT_CODE,))
    timer.daemon = True
    timer.start()
