"""The gRPC server around a model: ports that open before it does, and a shut-down that loses no answer.

Health is NOT_SERVING until the worker runs. After SIGTERM the server turns NOT_SERVING, waits for load balancers to
notice, refuses new requests, lets running ones finish up to a limit, and cuts off the others. A second SIGTERM ends
all these waits at once, those that have not begun too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError, ServingError
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.logs import bounded
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.process import EngineState, State
from outrider.runtime.serving.observability.worker import WorkerMetrics, WorkerView
from outrider.runtime.serving.readiness import Listener, ServerState, Service
from outrider.runtime.serving.request_handler import RequestHandler
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.gate import Gate
from outrider.runtime.serving.security.grpc_gate import SCOPES_OF_GRPC, GrpcGate
from outrider.runtime.serving.supervision.memory import give_back_regularly
from outrider.runtime.serving.supervision.supervisor import FLUSH_S, Health, Supervisor, watched
from outrider.runtime.serving.v1.service import SERVICE, InferenceService

# Seconds for open health watches.
CLOSE_GRACE_S = 1.0

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
    """A gRPC server of a model; owns the model's worker from ``open`` to ``drain``.

    Args:
        readiness: takes requests.
        config: how many connections there may be.
        limits: how large a message may be.
        security: who is let in.
        services: protocols that gRPC carries beside ``outrider.v1``.
        listeners: other ways in, opened and closed with this one.

    Attributes:
        has_failed: set once the worker is lost for good, and everybody is answered.
        supervisor: of the model, once it is open.
    """

    def __init__(
        self,
        readiness: ServerState,
        config: ServerConfig,
        limits: RequestLimits,
        *,
        security: Security | None = None,
        services: Sequence[Service] = (),
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.readiness = readiness
        self._security = security or Security()
        self._listeners = listeners
        self._health = Health(readiness, "", SERVICE)
        self._max_connections = config.max_connections
        options = (
            *SERVER_OPTIONS,
            ("grpc.max_allowed_incoming_connections", config.max_connections),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
        )
        services = (InferenceService(readiness), *services)
        gate = GrpcGate(
            Gate(
                self._security.authenticator,
                self._note_refusal,
                self._security.places.let_in,
                self._security.places.left,
            ),
            {**SCOPES_OF_GRPC, **scopes_of(services)},
            has_open_health=self._security.options.has_open_health,
        )
        self._server = grpc.aio.server(interceptors=(gate,), options=options)
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
        return State.SERVING if self.readiness.serving.worker.is_ready else State.RESTARTING

    @property
    def metrics(self) -> Metrics:
        """What is counted."""
        return self.readiness.accounting.metrics

    async def listen(self, *addresses: str) -> int:
        """Open the ports, and return the first address' one; 0 for a Unix socket.

        Health is NOT_SERVING, and methods answer NOT_READY, until ``open``.

        Raises:
            ConfigError: an address cannot be bound.
        """
        await self._health.begin()
        try:
            # These first: gRPC gives a port back with its server alone, not where another listener fails.
            for listener in self._listeners:
                await listener.start()
            ports = [self._security.listen(self._server, address) for address in addresses]
        except (ConfigError, OSError):
            for listener in self._listeners:
                await listener.stop()
            raise
        await self._server.start()
        places = {port: self._max_connections for port in ports if port}
        for listener in self._listeners:
            places |= listener.places
        self._tasks = [
            watched(
                self._security.places.watch(places, self.metrics.process.evicted.inc),
                self.has_failed,
            ),
            asyncio.create_task(give_back_regularly()),
            watched(self._security.watch(), self.has_failed),
            watched(self.metrics.process.loop_lag.watch(), self.has_failed),
        ]
        return ports[0]

    async def open(self, serving: LoadedModel) -> None:
        """Start a model's worker and take requests; health is SERVING."""
        handler = self.readiness.open(serving)
        self.metrics.registry.register(WorkerMetrics(_view(serving, handler)))
        serving.worker.start()
        await self._health.set_serving(True)
        self.supervisor = Supervisor(serving, handler, self._health, self.has_failed)

    async def abandon(self) -> None:
        """Close the ports after ``has_failed``, or a start that failed; a worker stays as it is."""
        await self._close()

    def hurry(self) -> None:
        """End all waits of a drain, those that have not begun too: running answers are cut off."""
        self._hurry.set()

    async def drain(self) -> int:
        """Shut down without losing an answer, once a model is open.

        Returns:
            The number of streams cut short; more than 0, too, where the worker hangs or is dead.
        """
        supervisor, serving, handler = (
            self.supervisor,
            self.readiness.serving,
            self.readiness.handler,
        )
        assert supervisor is not None
        config, worker = serving.config, serving.worker
        supervisor.is_draining = True
        log.info("draining: %d streams are open", handler.num_streams)
        await self._health.set_serving(False)
        await self._wait_or_hurry(self._hurry.wait(), config.lb_delay_s)
        handler.close_admission()
        worker.drain()
        await self._wait_or_hurry(handler.wait_idle(), config.drain_timeout_s)
        has_stopped = await asyncio.to_thread(worker.stop, 0.0)
        if not has_stopped:
            log.error("a step is stuck in the engine")
        await self._wait_or_hurry(handler.wait_idle(), FLUSH_S)
        await supervisor.stop()
        await self._close()
        if serving.grammars is not None:
            await asyncio.to_thread(serving.grammars.close)
        log.info("drained: %d streams were cut", handler.num_cut)
        return handler.num_cut + (not has_stopped) + self.has_failed.is_set()

    async def _close(self) -> None:
        for listener in self._listeners:
            await listener.stop()
        await self._server.stop(CLOSE_GRACE_S)
        if (audit := self.readiness.accounting.audit) is not None:
            await asyncio.to_thread(audit.flush)
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
        caller = ClientIdentity(peer=peer, protocol=bounded(method.strip("/").rpartition("/")[0]))
        if identity is not None:
            caller = replace(caller, tenant=identity.tenant, key=identity.key)
        self.readiness.accounting.refused(method.removeprefix(f"/{SERVICE}/"), caller, error)


def scopes_of(services: Iterable[Service]) -> dict[str, str]:
    """Return what a caller needs, by method."""
    return {
        f"/{one.name}/{method}": scope for one in services for method, scope in one.scopes.items()
    }


def _view(serving: LoadedModel, handler: RequestHandler) -> WorkerView:
    """Return what a scrape reads of a model's worker."""
    worker = serving.worker
    return WorkerView(
        snapshot=worker.snapshot,
        num_restarts=lambda: worker.num_restarts,
        num_streams=lambda: handler.num_streams,
        max_context=serving.model.max_context,
        has_sources=serving.model.max_source > 0,
        has_prefixes=serving.config.prefix_cache_bytes > 0,
    )
