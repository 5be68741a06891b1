"""``outrider health``: whether a server is serving, for probes of containers and for scripts that wait."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.runtime.cli.connection import (
    DEFAULT_ADDRESS,
    AllowInsecure,
    ApiKeyFile,
    Connection,
    TlsCa,
    TlsCertificate,
    TlsKey,
)
from outrider.runtime.cli.refusals import EXIT_FAILED, refusals

if TYPE_CHECKING:
    from outrider import SyncClient

CALL_S = 5.0
"""Seconds for an answer."""
LEAST_S = 0.5
"""Seconds for an answer at the end of a wait."""
LOOK_EVERY_S = 0.5
NOBODY = "UNAVAILABLE: "
"""Before what the transport says, which has no reason of the server's."""


class Service(StrEnum):
    """What may be asked: whether the process lives, or whether it takes requests."""

    LIVENESS = "liveness"
    READY = "ready"


def health(
    address: Annotated[
        str, typer.Option(envvar="OUTRIDER_HEALTH_ADDRESS", help="HOST:PORT or unix:PATH.")
    ] = DEFAULT_ADDRESS,
    service: Annotated[
        Service, typer.Option(help="ready: takes requests; liveness: not to be restarted.")
    ] = Service.READY,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for it, with its stages as lines.")
    ] = 0.0,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Say whether a server is serving: exit code 0, or 1 where it is not or cannot be reached."""
    connection = Connection(
        address=address,
        api_key_file=api_key_file,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
    )
    ends_s = time.monotonic() + (wait or CALL_S)
    told = ""
    with refusals(), connection.open_probe() as client:
        while (found := _look(client, service, ends_s)) is not None:
            left_s = ends_s - time.monotonic() if wait else 0.0
            # While nobody listens, the transport's words change with each attempt.
            if left_s <= 0.0 or (found != told and not found.startswith(NOBODY)):
                typer.echo(f"outrider: {found}", err=True)
                told = found
            if left_s <= 0.0:
                raise typer.Exit(EXIT_FAILED)
            time.sleep(min(LOOK_EVERY_S, left_s))
    typer.echo("serving")


def _look(client: SyncClient, service: Service, ends_s: float) -> str | None:
    """Return why a server is not serving, in its own words where it has some; None where it is."""
    from outrider import CallError

    names = (service,) if service is Service.LIVENESS else ()
    try:
        if client.is_serving(*names, timeout_s=_patience_s(ends_s)):
            return None
        return "not serving" if names else _reason(client, ends_s)
    except CallError as error:
        return str(error)


def _reason(client: SyncClient, ends_s: float) -> str:
    """Return why a server takes no requests: of a start its stage is raised."""
    from outrider import PermissionDenied, Unauthenticated

    try:
        is_draining = client.info(timeout_s=_patience_s(ends_s)).load.is_draining
    except (PermissionDenied, Unauthenticated):
        # Health is told without credentials, the rest is not.
        return "not serving"
    return "draining" if is_draining else "not serving"


def _patience_s(ends_s: float) -> float:
    """Return the seconds that a call may take."""
    return min(CALL_S, max(LEAST_S, ends_s - time.monotonic()))
