"""Prometheus metrics of the server's process: what it is, what state it is in, and how long its event loop lags."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata

from outrider.runtime.serving.observability.histogram import Histogram, family
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LAG_EVERY_S = 0.05
"""Seconds between two looks at the event loop: a longer hold is always seen, and a look takes 20 us."""
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class State(StrEnum):
    """What a server is at. FAILED: its worker is lost for good, and the process ends."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class BuildInfo(Collector):
    """Which version serves."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one metric."""
        labels = {"version": server_version(), "python": platform.python_version()}
        family = GaugeMetricFamily("outrider_build_info", "Versions; always 1", labels=[*labels])
        family.add_metric([*labels.values()], 1.0)
        yield family


class EngineState(Collector):
    """Which of its states a server is in: 1 for that one, 0 for the others."""

    def __init__(self, read: Callable[[], State]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one metric."""
        now = self._read()
        family = GaugeMetricFamily(
            "outrider_engine_state", "1 for the state that the server is in", labels=["state"]
        )
        for state in State:
            family.add_metric([state], float(state is now))
        yield family


class LoopLag(Histogram):
    """How late the event loop does what is due: while it is late, no message is sent."""

    def __init__(self) -> None:
        super().__init__(
            "outrider_loop_lag_seconds",
            "Lateness of the event loop, 20 times a second",
            LAG_BUCKETS,
        )

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric, and once more under the name that it had until 0.2."""
        yield from super().collect()
        text = "The same, under its name until 0.2"
        yield family("outrider_event_loop_lag_seconds", text, self._bounds, self._counts, self._sum)

    async def watch(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.observe(max(0.0, loop.time() - due_s))


class ProcessMetrics:
    """What concerns the process and none of its requests.

    Attributes:
        loop_lag: to have watched on the event loop.
        reload_failures: of files, by name.
        evicted: connections.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.loop_lag = LoopLag()
        registry.register(self.loop_lag)
        self.reload_failures = Counter(
            "outrider_reload_failures",
            "Files that changed and could not be used",
            ("file",),
            registry=registry,
        )
        self.evicted = Counter(
            "outrider_connections_evicted",
            "Connections closed to make room for others",
            registry=registry,
        )


def server_version() -> str:
    """Return the version of the installed server; "uninstalled" in a checkout."""
    try:
        return metadata.version("outrider-server")
    except metadata.PackageNotFoundError:
        return "uninstalled"
