"""Options of ``outrider serve``: how much it takes on, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from outrider.runtime.cli.serve.settings import merge_pairs
from outrider.runtime.core.breaker import BreakerConfig
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import parse_pairs
from outrider.runtime.core.errors import ConfigError

PANEL = "Limits and waits"

MaxRunning = Annotated[int, typer.Option(help="Requests that hold a slot.", rich_help_panel=PANEL)]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a slot. Default: the bundle's, as memory allows.", rich_help_panel=PANEL
    ),
]
MaxQueued = Annotated[int, typer.Option(help="Requests that wait for one.", rich_help_panel=PANEL)]
MaxConnections = Annotated[int, typer.Option(help="Of clients, at once.", rich_help_panel=PANEL)]
QueueTimeoutS = Annotated[float, typer.Option(help="Longest wait, seconds.", rich_help_panel=PANEL)]
DrainTimeoutS = Annotated[float, typer.Option(help="For running requests.", rich_help_panel=PANEL)]
HangS = Annotated[
    float,
    typer.Option(
        help="A step of at least this and 20 usual ones ends the process.",
        rich_help_panel=PANEL,
    ),
]
LbDelayS = Annotated[
    float, typer.Option(help="For load balancers to notice.", rich_help_panel=PANEL)
]
MessageIntervalS = Annotated[
    float,
    typer.Option(
        help="Between two messages of a stream, where steps are short.", rich_help_panel=PANEL
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        help="Any other limit, NAME=VALUE (see outrider config --show); repeat for several.",
        rich_help_panel=PANEL,
        callback=merge_pairs,
    ),
]

OF_SERVER = (
    "max_queued_tokens",
    "prefill_chunk",
    "read_tokens",
    "max_unsent_chunks",
    "stall_timeout_s",
    "retry_after_s",
)
"""Fields of ``ServerConfig`` without an option of their own."""
BREAKER = "breaker_"
"""Before the names of ``BreakerConfig``'s fields."""


def limit_values(config: ServerConfig, of_requests: RequestLimits) -> dict[str, Any]:
    """Return what --limit sets, by name, as these have it."""
    of_server = {name: getattr(config, name) for name in OF_SERVER}
    of_breaker = {f"{BREAKER}{name}": value for name, value in asdict(config.breaker).items()}
    return of_server | of_breaker | asdict(of_requests)


def parse_limits(texts: Sequence[str]) -> tuple[dict[str, Any], RequestLimits]:
    """Return fields of ``ServerConfig``, and the limits of requests; those of ``texts`` are NAME=VALUE.

    Raises:
        ConfigError: a limit is unknown or out of range.
    """
    given = parse_pairs("limit", texts, limit_values(ServerConfig(), RequestLimits()))
    of_server: dict[str, Any] = {name: given.pop(name) for name in OF_SERVER if name in given}
    of_breaker = {name: given.pop(name) for name in [*given] if name.startswith(BREAKER)}
    patience: dict[str, Any] = {name.removeprefix(BREAKER): one for name, one in of_breaker.items()}
    try:
        breaker = BreakerConfig(**patience)
    except ConfigError as error:
        raise ConfigError(f"{BREAKER}{error.key}", error.rule) from error
    return of_server | {"breaker": breaker}, RequestLimits(**given)  # type: ignore[arg-type]
