"""Writes the table of docs/observability.md: every metric of ``outrider serve``, its type, labels and meaning.

    python -m scripts.list_metrics

The metrics are asked of the collectors that a server registers, as of one with an encoder and a cache of prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.runtime.loop.totals import Totals
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.process import EngineState, State
from outrider.runtime.serving.observability.worker import WorkerMetrics, WorkerView
from prometheus_client import Counter
from prometheus_client.core import Metric

PAGE = Path(__file__).parents[1] / "docs" / "observability.md"
BEGIN, END = "<!-- begin: python -m scripts.list_metrics -->", "<!-- end -->"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def renewed(page: str) -> str:
    """Return the page with a table of the metrics that there are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join((before + BEGIN, *table(), END + after))


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| metric | type | labels | what it says |"
    yield "|---|---|---|---|"
    metrics = all_metrics()
    labels = labels_by_name(metrics)
    for family in metrics.registry.collect():
        names = ", ".join(f"`{one}`" for one in labels.get(family.name, _labels_of(family)))
        yield f"| `{full_name(family)}` | {family.type} | {names} | {family.documentation} |"


def all_metrics() -> Metrics:
    """Return metrics with all that a server adds to them."""
    metrics, totals = Metrics(), Totals()
    view = WorkerView(
        snapshot=lambda: totals.snapshot(
            num_running=0,
            num_queued=0,
            num_queued_tokens=0,
            num_slots=1,
            num_free_slots=1,
            is_draining=False,
        ),
        num_restarts=lambda: 0,
        num_streams=lambda: 0,
        max_context=1,
        has_sources=True,
        has_prefixes=True,
    )
    metrics.registry.register(EngineState(lambda: State.SERVING))
    metrics.registry.register(WorkerMetrics(view))
    return metrics


def labels_by_name(metrics: Metrics) -> dict[str, tuple[str, ...]]:
    """Return the labels of counters, which have no sample before something is counted."""
    parts = (metrics, metrics.speculation, metrics.process)
    values = [value for part in parts for value in vars(part).values()]
    counters = [one for one in values if isinstance(one, Counter)]
    return {one._name: tuple(one._labelnames) for one in counters}


def full_name(family: Metric) -> str:
    """Return a metric's name as queries have it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels_of(family: Metric) -> list[str]:
    return sorted({label for sample in family.samples for label in sample.labels} - {"le"})


if __name__ == "__main__":
    main()
