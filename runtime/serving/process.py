"""A server as a process: from options to an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.engine_process.worker import open_isolated
from outrider.runtime.serving.factory import load_model, settle_loaded
from outrider.runtime.serving.http.factory import open_api, open_metrics
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.scrape_collector import ScrapeCollector
from outrider.runtime.serving.observability.tracing import open_spans
from outrider.runtime.serving.protocols import services_of
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.addresses import UNIX
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.server import CLOSE_GRACE_S, Server
from outrider.runtime.serving.settings import ServeOptions, Stage
from outrider.runtime.serving.supervision.memory import use_few_arenas
from outrider.runtime.serving.supervision.notify import READY, STOPPING, notify
from outrider.runtime.serving.supervision.supervisor import FLUSH_S

# The worker's thread asks for the interpreter after every engine call, several times in a step, and
# waits this long while the event loop is busy. Python's 5 ms are a whole step: on two busy cores a
# stream through gRPC ran 12 % (batch 1) and 15 % (batch 8) faster with less.
SWITCH_INTERVAL_S = 2e-4
# Seconds that a stuck engine gets beyond those of the whole drain.
GUARD_S = 10.0
GUARD_EXIT_CODE = 70

log = logging.getLogger(__name__)


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
    # Each connection is a file; the usual limit of 1,024 is for programs that call select.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where the system refuses, what it allows is left
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    metrics = Metrics()
    security, addresses = open_security(options, metrics)
    spans = open_spans(options.watch.otlp_endpoint, options.name_of(root))
    accounting = RequestAccounting(
        metrics,
        time.monotonic,
        audit=None if options.audit_log is None else AuditLog(options.audit_log),
        is_listed=security.is_listed,
        has_access_lines=options.watch.logs.has_access_lines,
        spans=spans,
    )
    readiness = ServerState(accounting)
    collector = ScrapeCollector(
        metrics.registry, options.name_of(root), options.watch.has_vllm_names
    )
    api = open_api(readiness, security, options)
    scraped = open_metrics(readiness, security, options.watch.metrics_address, collector)
    server = Server(
        readiness,
        options.config,
        options.limits,
        security=security,
        services=services_of(options, readiness),
        listeners=[one for one in (scraped, api) if one is not None],
    )
    stopping = _stopping(server)
    port = await server.listen(*addresses)
    if scraped is not None and scraped.port:
        log.info("metrics on port %d", scraped.port)
    await _open_or_stop(server, root, options, stopping)
    line = _tell_port(port, addresses[0], options.port_file)
    if api is not None:
        _tell_port(api.port, "HTTP", options.http_port_file, "HTTP ")
    notify(READY, status=line)
    await _run(server, stopping)
    _guard(options.config)
    num_cut = await server.drain()
    if spans is not None:
        await asyncio.to_thread(spans.close)
    return 1 if num_cut else 0


def _stopping(server: Server) -> asyncio.Task[bool]:
    """Return a task that ends with the first SIGTERM or SIGINT; further ones end all waits of the drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: server.hurry() if stop.is_set() else stop.set())
    return asyncio.create_task(stop.wait())


async def _open_or_stop(
    server: Server, root: Path, options: ServeOptions, stopping: asyncio.Task[bool]
) -> None:
    """Open the model; a process that is to stop meanwhile ends here."""
    opening = asyncio.create_task(_open(root, options, server.readiness))
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        await server.abandon()
        _exit(0)
    try:
        await server.open(opening.result())
    except BaseException:
        await server.abandon()
        raise


async def _run(server: Server, stopping: asyncio.Task[bool]) -> None:
    """Return once the process is to stop; where the worker is lost, it ends here."""
    failing = asyncio.create_task(server.has_failed.wait())
    await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        await server.abandon()
        _exit(GUARD_EXIT_CODE)
    failing.cancel()
    notify(STOPPING, status="draining")


async def _open(root: Path, options: ServeOptions, readiness: ServerState) -> LoadedModel:
    """Return the opened model, while the event loop answers probes."""
    options = replace(options, stage=_noted(options.stage, readiness))
    readiness.note("opening the bundle")
    opened = open_isolated if options.isolates_engine else load_model
    serving = await asyncio.to_thread(opened, root, options)
    settle_loaded()
    return serving


def _noted(stage: Stage, readiness: ServerState) -> Stage:
    """Return a stage that probes are told of, too."""

    @contextmanager
    def noted(text: str) -> Iterator[None]:
        before = readiness.stage
        readiness.note(text)
        with stage(text):
            yield
        readiness.note(before)

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


def open_security(options: ServeOptions, metrics: Metrics) -> tuple[Security, list[str]]:
    """Return the server's security, and the addresses that it allows to listen on.

    Raises:
        ConfigError: a file or an address cannot be used.
    """
    failed = metrics.process.reload_failures
    security = Security(options.security, lambda name: failed.labels(file=name).inc())
    addresses = [options.address]
    if options.socket_path is not None:
        addresses.append(f"{UNIX}{options.socket_path}")
    for address in addresses:
        security.check("host", address)
    if (certificate := security.certificate) is not None:
        metrics.watch(
            "tls_certificate_expiry_seconds",
            "Until the certificate ends",
            lambda: certificate().ends_s - time.time(),
        )
    return security, addresses


def _guard(config: ServerConfig) -> None:
    """End the process even if the drain hangs."""
    total_s = config.lb_delay_s + config.drain_timeout_s + FLUSH_S + CLOSE_GRACE_S
    timer = threading.Timer(total_s + GUARD_S, os._exit, args=(GUARD_EXIT_CODE,))
    timer.daemon = True
    timer.start()
