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
        from outrider.runtime.serving.security.keys import new_key

        words = [word.strip() for word in scopes.split(",")]
        secret, known = new_key(tenant, words, name)
        if file is not None:
            _append(file, known.line())
    typer.echo(secret)
    if file is None:
        typer.echo(known.line())


def _append(file: Path, line: str) -> None:
    """Add a line to a file that is its owner's, behind a last one that may have been left unended by hand."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with open(os.open(file, flags, mode=0o600), "rb+") as keys:
        before = keys.read()
        if before and not before.endswith(b"\n"):
            keys.write(b"\n")
        keys.write(line.encode() + b"\n")
