"""Options of ``outrider serve``: what it tells of itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.runtime.cli.refusals import EXIT_BUG

if TYPE_CHECKING:
    from outrider.runtime.serving.observability.logs import LogOptions

PANEL = "Logs, metrics and traces"

MetricsPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Prometheus on the loopback.", rich_help_panel=PANEL),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(help="Prometheus on HOST:PORT or unix:PATH.", rich_help_panel=PANEL),
]
VllmMetricNames = Annotated[
    bool,
    typer.Option(help="Tell metrics under vLLM's names, too.", rich_help_panel=PANEL),
]
LogFormat = Annotated[str, typer.Option(help="console or json.", rich_help_panel=PANEL)]
LogLevel = Annotated[
    str, typer.Option(help="debug, info, warning, error or critical.", rich_help_panel=PANEL)
]
AccessLog = Annotated[
    bool, typer.Option(help="A line of each request, once it has ended.", rich_help_panel=PANEL)
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="URL of a collector of traces, OTLP over gRPC. Default: as OTEL_ variables say.",
        rich_help_panel=PANEL,
    ),
]


def log_options(log_format: str, log_level: str, access_log: bool) -> LogOptions:
    """Return how to log.

    Raises:
        ConfigError: a name is unknown.
    """
    from outrider.runtime.serving.observability.logs import LogOptions

    return LogOptions(format=log_format, level=log_level, has_access_lines=access_log)


@contextmanager
def bugs_logged() -> Iterator[None]:
    """End the command with a line of the log for an exception that is no refusal."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        logging.getLogger("outrider").critical("uncaught", exc_info=True)
        raise typer.Exit(EXIT_BUG) from error
