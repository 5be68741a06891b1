"""Turns known errors of a command into one line on standard error and an exit code."""

from __future__ import annotations

import typer

EXIT_REFUSED = 2


class refusals:  # noqa: N801  (reads as a phrase in a with statement)
    """Known errors as one line on standard error and an exit code, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from outrider import CallError
        from outrider.engines.base import SpeculativeError

        if isinstance(error, (SpeculativeError, CallError, OSError)):
            typer.echo(f"outrider: {error}", err=True)
            raise typer.Exit(EXIT_REFUSED) from error
