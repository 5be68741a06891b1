"""Builds the gRPC server around a bundle, and shuts it down without losing an answer.

Health is NOT_SERVING until the worker runs. After SIGTERM the server turns NOT_SERVING, waits for load balancers to
notice, refuses new requests, lets running ones finish up to a limit, and cuts off the others. A second SIGTERM ends
the present wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.tenant import Identity
from outrider.runtime.core.validate import RequestLimits
from outrider.runtime.serving.dialects import services_of
from outrider.runtime.serving.doors.addresses import UNIX
from outrider.runtime.serving.doors.audit import AuditLog
from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.doors.gate import Gate
from outrider.runtime.serving.doors.scrape import MetricsListener
from outrider.runtime.serving.frontend import Frontend
from outrider.runtime.serving.http.opening import open_listeners
from outrider.runtime.serving.intake import Intake, Listener, Service
from outrider.runtime.serving.isolated.worker import open_isolated
from outrider.runtime.serving.ledger import Caller, Ledger
from outrider.runtime.serving.memory import give_back_regularly, use_few_arenas
from outrider.runtime.serving.opening import ServeOptions, Stage, open_serving, settle_loaded
from outrider.runtime.serving.served_model import Serving
from outrider.runtime.serving.supervision.notify import READY, STOPPING, notify
from outrider.runtime.serving.supervision.supervisor import FLUSH_S, Health, Supervisor, watched
from outrider.runtime.serving.v1.service import SERVICE, InferenceService
from outrider.runtime.serving.watch.exposition import Exposition
from outrider.runtime.serving.watch.logs import bounded
from outrider.runtime.serving.watch.metrics import Metrics
from outrider.runtime.serving.watch.process import EngineState, State
from outrider.runtime.serving.watch.tracing import open_spans
from outrider.runtime.serving.watch.worker import WorkerMetrics, WorkerView

# The worker's thread asks for the interpreter after every engine call, several times in a step, and
# waits this long while the event loop is busy. Python's 5 ms are a whole step: on two busy cores a
# stream through gRPC ran 12 % (batch 1) and 15 % (batch 8) faster with less.
SWITCH_INTERVAL_S = 2e-4
# Seconds for open health watches, and for a stuck engine.
CLOSE_GRACE_S = 1.0
GUARD_S = 10.0
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
    """A gRPC server behind ``doors``, over what ``intake`` serves; owns the model's worker from ``open`` to ``drain``.

    Args:
        intake: takes requests.
        config: how many connections there may be.
        limits: how large a message may be.
        doors: who is let in.
        services: dialects that gRPC carries beside ``outrider.v1``.
        listeners: other ways in, opened and closed with this one.

    Attributes:
        has_failed: set once the worker is lost for good, and everybody is answered.
        supervisor: of the model, once it is open.
    """

    def __init__(
        self,
        intake: Intake,
        config: ServerConfig,
        limits: RequestLimits,
        *,
        doors: Doors | None = None,
        services: Sequence[Service] = (),
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.intake = intake
        self._doors = doors or Doors()
        self._listeners = listeners
        self._health = Health(intake, "", SERVICE)
        options = (
            *SERVER_OPTIONS,
            ("grpc.max_allowed_incoming_connections", config.max_connections),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
        )
        gate = Gate(
            self._doors.authenticator,
            has_open_health=self._doors.options.has_open_health,
            refused=self._note_refusal,
        )
        self._server = grpc.aio.server(interceptors=(gate,), options=options)
        services = (InferenceService(intake), *services)
        self._server.add_generic_rpc_handlers(tuple(one.handler() for one in services))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        names = (*(one.name for one in services), health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.has_failed = asyncio.Event()
        self.supervisor: Supervisor | None = None
        self.metrics.registry.register(EngineState(lambda: self.state))

    @property
    def state(self) -> State:
        """What the server is at."""
        if self.has_failed.is_set():
            return State.FAILED
        if self.supervisor is None:
            return State.STARTING
        if self.supervisor.is_draining:
            return State.DRAINING
        return State.SERVING if self.intake.serving.worker.is_ready else State.RESTARTING

    @property
    def metrics(self) -> Metrics:
        """What is counted."""
        return self.intake.ledger.metrics

    async def listen(self, *addresses: str) -> int:
        """Open the ports, and return the first address' one; 0 for a Unix socket.

        Health is NOT_SERVING, and methods answer NOT_READY, until ``open``.

        Raises:
            ConfigError: an address cannot be bound.
        """
        await self._health.begin()
        ports = [self._doors.listen(self._server, address) for address in addresses]
        for listener in self._listeners:
            await listener.start()
        await self._server.start()
        self._tasks = [
            asyncio.create_task(give_back_regularly()),
            watched(self._doors.watch(), self.has_failed),
            watched(self.metrics.loop_lag.watch(), self.has_failed),
        ]
        return ports[0]

    async def open(self, serving: Serving) -> None:
        """Start a model's worker and take requests; health is SERVING."""
        frontend = self.intake.open(serving)
        self.metrics.registry.register(WorkerMetrics(_view(serving, frontend)))
        serving.worker.start()
        await self._health.set_serving(True)
        self.supervisor = Supervisor(serving, frontend, self._health, self.has_failed)

    async def abandon(self) -> None:
        """Close the ports after ``has_failed``, or a start that failed; a worker stays as it is."""
        await self._close()

    def hurry(self) -> None:
        """End the waits of a running drain."""
        self._hurry.set()

    async def drain(self) -> int:
        """Shut down without losing an answer, once a model is open.

        Returns:
            The number of streams cut short; more than 0, too, where the worker hangs or is dead.
        """
        supervisor, serving, frontend = self.supervisor, self.intake.serving, self.intake.frontend
        assert supervisor is not None
        config, worker = serving.config, serving.worker
        supervisor.is_draining = True
        log.info("draining: %d streams are open", frontend.num_streams)
        await self._health.set_serving(False)
        await self._wait_or_hurry(self._hurry.wait(), config.lb_delay_s)
        frontend.close_admission()
        worker.drain()
        await self._wait_or_hurry(frontend.wait_idle(), config.drain_timeout_s)
        has_stopped = await asyncio.to_thread(worker.stop, 0.0)
        if not has_stopped:
            log.error("a step is stuck in the engine")
        await self._wait_or_hurry(frontend.wait_idle(), FLUSH_S)
        await supervisor.stop()
        await self._close()
        if serving.grammars is not None:
            await asyncio.to_thread(serving.grammars.close)
        log.info("drained: %d streams were cut", frontend.num_cut)
        return frontend.num_cut + (not has_stopped) + self.has_failed.is_set()

    async def _close(self) -> None:
        for listener in self._listeners:
            await listener.stop()
        await self._server.stop(CLOSE_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        caller = Caller(peer=peer, dialect=bounded(method.strip("/").rpartition("/")[0]))
        if identity is not None:
            caller = replace(caller, tenant=identity.tenant, key=identity.key)
        self.intake.ledger.refused(method.removeprefix(f"/{SERVICE}/"), caller, error)


def _view(serving: Serving, frontend: Frontend) -> WorkerView:
    """Return what a scrape reads of a model's worker."""
    worker = serving.worker
    return WorkerView(
        snapshot=worker.snapshot,
        num_restarts=lambda: worker.num_restarts,
        num_streams=lambda: frontend.num_streams,
        max_context=serving.model.max_context,
        has_sources=serving.model.max_source > 0,
        has_prefixes=serving.config.prefix_cache_bytes > 0,
    )


async def serve(root: Path, options: ServeOptions) -> int:
    """Serve a bundle until SIGTERM or SIGINT, and return the exit code: 0, or 1 where streams were cut or it hung.

    Ports are open while the model opens, so that probes are answered. Where the worker hangs or is dead, the process
    ends with ``GUARD_EXIT_CODE``: no return from a hung library.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_few_arenas()
    metrics = Metrics()
    doors, addresses, scraped = open_doors(root, options, metrics)
    audit = None if options.audit_log is None else AuditLog(options.audit_log)
    ledger = Ledger(
        metrics,
        time.monotonic,
        audit=audit,
        is_listed=doors.is_listed,
        has_access_lines=options.watch.logs.has_access_lines,
        spans=(spans := open_spans(options.watch.otlp_endpoint, options.name_of(root))),
    )
    intake = Intake(ledger)
    listeners = open_listeners(intake, doors, options)
    server = Server(
        intake,
        options.config,
        options.limits,
        doors=doors,
        services=services_of(options, intake),
        listeners=listeners,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: server.hurry() if stop.is_set() else stop.set())
    port = await server.listen(*addresses)
    stopping = asyncio.create_task(stop.wait())
    opening = asyncio.create_task(_open(root, options, intake))
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        await server.abandon()
        _exit(0)
    try:
        await server.open(opening.result())
    except BaseException:
        await server.abandon()
        raise
    line = _tell_port(port, addresses[0], options.port_file)
    for listener in listeners:
        _tell_port(listener.port, "HTTP", options.http_port_file, "HTTP ")
    notify(READY, status=line)
    failing = asyncio.create_task(server.has_failed.wait())
    await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        await server.abandon()
        _exit(GUARD_EXIT_CODE)
    failing.cancel()
    notify(STOPPING, status="draining")
    _guard(options.config)
    num_cut = await server.drain()
    if scraped is not None:
        scraped.close()
    if spans is not None:
        await asyncio.to_thread(spans.close)
    return 1 if num_cut else 0


async def _open(root: Path, options: ServeOptions, intake: Intake) -> Serving:
    """Return the opened model, while the event loop answers probes."""
    options = replace(options, stage=_noted(options.stage, intake))
    intake.note("opening the bundle")
    opened = open_isolated if options.isolates_engine else open_serving
    serving = await asyncio.to_thread(opened, root, options)
    settle_loaded()
    return serving


def _noted(stage: Stage, intake: Intake) -> Stage:
    """Return a stage that probes are told of, too."""

    @contextmanager
    def noted(text: str) -> Iterator[None]:
        before = intake.stage
        intake.note(text)
        with stage(text):
            yield
        intake.note(before)

    return noted


def _tell_port(port: int, address: str, file: Path | None, what: str = "") -> str:
    """Say that requests are taken, and where; return what was said."""
    if file is not None:
        unfinished = file.with_name(file.name + ".new")
        unfinished.write_text(f"{port}\n", encoding="utf-8")
        unfinished.replace(file)
    line = f"serving {what}on port {port}" if port else f"serving on {address}"
    print(line, flush=True)
    log.info("%s", line)
    return line


def _exit(code: int) -> NoReturn:
    """End the process while another thread is in a library that may not return."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def open_doors(
    root: Path, options: ServeOptions, metrics: Metrics
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
    if options.watch.metrics_address is not None:
        listener = MetricsListener(
            options.watch.metrics_address,
            Exposition(metrics.registry, options.name_of(root), options.watch.has_vllm_names),
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
