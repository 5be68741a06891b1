"""Options of ``outrider serve``: who is let in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PANEL = "Who is let in"

TrustedSigners = Annotated[
    Path | None,
    typer.Option(
        help="Public keys, PEM: one of them must have signed the bundle (outrider sign).",
        rich_help_panel=PANEL,
    ),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(help="Of the server, PEM.", rich_help_panel=PANEL)
]
TlsKey = Annotated[
    Path | None, typer.Option(help="Of the certificate, PEM.", rich_help_panel=PANEL)
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(help="Clients need a certificate by these, PEM.", rich_help_panel=PANEL),
]
Keys = Annotated[
    Path | None,
    typer.Option(help="Hashes of API keys (outrider key new).", rich_help_panel=PANEL),
]
JwtKeys = Annotated[
    Path | None,
    typer.Option(help="JSON web key set of who signs tokens.", rich_help_panel=PANEL),
]
JwtAudience = Annotated[
    str | None, typer.Option(help="That tokens must be for.", rich_help_panel=PANEL)
]
JwtTenantClaim = Annotated[
    str, typer.Option(help="Claim of tokens that is the tenant.", rich_help_panel=PANEL)
]
Tenants = Annotated[
    Path | None,
    typer.Option(help="Shares and certificates of tenants, TOML.", rich_help_panel=PANEL),
]
OpenHealth = Annotated[
    bool,
    typer.Option(help="Tell health to callers without credentials.", rich_help_panel=PANEL),
]
AuditLog = Annotated[
    Path | None,
    typer.Option(help="File that gets a line of JSON per request.", rich_help_panel=PANEL),
]
ReloadEveryS = Annotated[
    float, typer.Option(help="Between two looks at these files.", rich_help_panel=PANEL)
]
