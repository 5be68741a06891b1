"""Options of ``outrider serve``: how much it takes on, and how long it waits."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Limits and waits"

MaxRunning = Annotated[int, typer.Option(help="Requests that hold a slot.", rich_help_panel=PANEL)]
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
