"""Options of ``outrider serve``: where it listens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PANEL = "Addresses"

Host = Annotated[
    str | None,
    typer.Option(
        help="Interface to listen on; other than the loopback's with TLS only. Default: 127.0.0.1.",
        rich_help_panel=PANEL,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="0 takes a free one. Default: 50051.", rich_help_panel=PANEL
    ),
]
Uds = Annotated[
    Path | None,
    typer.Option(
        help="Unix socket to listen on; without --host and --port nothing else is.",
        rich_help_panel=PANEL,
    ),
]
PortFile = Annotated[
    Path | None, typer.Option(help="Written with the bound port.", rich_help_panel=PANEL)
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen for other machines without TLS.", rich_help_panel=PANEL
    ),
]


def addresses(host: str | None, port: int | None, uds: Path | None) -> list[str]:
    """Return the addresses that were asked for, the one of TCP first."""
    from outrider.runtime.serving.doors.addresses import UNIX, tcp_address

    found = []
    if uds is None or host is not None or port is not None:
        found.append(tcp_address(host or "127.0.0.1", 50051 if port is None else port))
    return found + ([] if uds is None else [f"{UNIX}{uds}"])
