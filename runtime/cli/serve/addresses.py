"""Options of ``outrider serve``: where it listens, in which protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.core.errors import ConfigError

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
HttpPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="OpenAI's HTTP on the loopback.", rich_help_panel=PANEL),
]
HttpAddress = Annotated[
    str | None,
    typer.Option(
        help="OpenAI's HTTP on HOST:PORT; other than the loopback's with TLS only.",
        rich_help_panel=PANEL,
    ),
]
HttpPortFile = Annotated[
    Path | None, typer.Option(help="Written with the bound port of HTTP.", rich_help_panel=PANEL)
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen for other machines without TLS.", rich_help_panel=PANEL
    ),
]


def addresses(host: str | None, port: int | None, uds: Path | None) -> list[str]:
    """Return the addresses that were asked for, the one of TCP first."""
    from outrider.runtime.serving.security.addresses import UNIX, tcp_address

    found = []
    if uds is None or host is not None or port is not None:
        found.append(tcp_address(host or "127.0.0.1", 50051 if port is None else port))
    return found + ([] if uds is None else [f"{UNIX}{uds}"])


def one_address(name: str, port: int | None, address: str | None) -> str | None:
    """Return the address that NAME_port, on the loopback, or NAME_address names; None for nowhere.

    Raises:
        ConfigError: both are given.
    """
    if port is not None and address is not None:
        raise ConfigError(f"{name}_port", f"must be left out where {name}_address is given")
    return address if port is None else f"127.0.0.1:{port}"
