"""``outrider key``: API keys, of which a server has the hashes only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.refusals import refusals

key = typer.Typer(name="key", help="Keys of callers.", no_args_is_help=True)


@key.callback()
def group() -> None:
    """Keys of callers."""


@key.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose requests those with the key are.")],
    scopes: Annotated[
        str, typer.Option(help="What they may do, of generate, info and metrics, by commas.")
    ] = "generate,info",
    name: Annotated[str, typer.Option(help="For logs; default: a random one.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(help="File of keys that the line is added to, instead of printing it."),
    ] = None,
) -> None:
    """Print a new key, which is kept nowhere, and its line for the server's file of keys."""
    with refusals():
        from outrider.runtime.serving.doors.keys import new_key

        words = [word.strip() for word in scopes.split(",")]
        secret, known = new_key(tenant, words, name)
        if file is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with open(os.open(file, flags, mode=0o600), "a", encoding="utf-8") as keys:
                keys.write(f"{known.line()}\n")
    typer.echo(secret)
    if file is None:
        typer.echo(known.line())
