"""Turns known errors of a command into one line on standard error and an exit code."""

from __future__ import annotations

import signal
import sys
import unicodedata
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from outrider import CallError

# The command ran and found a fault: an exactness test that fails, streams that were cut, a server's own error.
EXIT_FAILED = 1
# What was asked for cannot be done: options, bundles, requests, packages that are missing.
EXIT_REFUSED = 2
# It may be done later or elsewhere: no server, one that is starting, stopping or full, a deadline.
EXIT_UNAVAILABLE = 3
# A bug of ours ended a server: as where its engine hangs, another start may do.
EXIT_BUG = 70
EXIT_TERMINATED = 128 + signal.SIGTERM

# Packages that are imported when a command needs them, and the extras of outrider-server that bring them.
EXTRAS = {
    "onnxruntime": "cpu",
    "cuda": "cuda",
    "tensorrt": "tensorrt",
    **dict.fromkeys(
        (
            "torch",
            "transformers",
            "optimum",
            "huggingface_hub",
            "onnx",
            "onnxscript",
            "onnx_ir",
            "safetensors",
        ),
        "export",
    ),
    **dict.fromkeys(("matplotlib", "jinja2"), "analysis"),
    **dict.fromkeys(("cryptography", "jwt"), "auth"),
}


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Where a drafter runs, only an interrupt ends the command: SystemExit may be the drafter's own."""


class refusals:  # noqa: N801  (reads as a phrase in a with statement)
    """Known errors as one line on standard error and an exit code, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from outrider import CallError
        from outrider.engines.base import SpeculativeError

        if isinstance(error, Terminated):
            raise typer.Exit(EXIT_TERMINATED) from error
        if isinstance(error, CallError):
            raise typer.Exit(say(error)) from error
        if isinstance(error, ModuleNotFoundError):
            line = _missing(error.name or "")
        elif isinstance(error, MemoryError):
            line = f"too little memory: {error or 'an allocation failed'}"
        elif isinstance(error, (SpeculativeError, OSError)):
            line = str(error)
        else:
            return
        if line:
            _say_line(line)
            raise typer.Exit(EXIT_REFUSED) from error


def say(error: CallError) -> int:
    """Say a server's answer in a line on standard error, and return the exit code for it."""
    _say_line(str(error))
    return _exit_code(error)


def _say_line(line: str) -> None:
    typer.echo(f"outrider: {_one_line(line)}", err=True)


def _missing(module: str) -> str:
    """Say how to install a package that a command needs; empty for one that only a mistake of ours can miss."""
    package = module.partition(".")[0]
    extra = EXTRAS.get(package)
    return f"needs {package}: pip install 'outrider-server[{extra}]'" if extra else ""


def _one_line(text: str) -> str:
    """Return a text in which nothing ends the line or cannot be written: paths may hold any byte."""
    return "".join(
        letter
        if letter.isprintable()
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text.strip()
    )


def _exit_code(error: CallError) -> int:
    from outrider import (
        CallCancelled,
        CallError,
        DeadlineExceeded,
        Overloaded,
        ServerFailed,
        Unavailable,
    )

    if isinstance(error, (Unavailable, Overloaded, DeadlineExceeded)):
        return EXIT_UNAVAILABLE
    if isinstance(error, (ServerFailed, CallCancelled)) or type(error) is CallError:
        return EXIT_FAILED
    return EXIT_REFUSED


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the command, within ``refusals``, so that what it has written half is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Terminated

    # Only the main thread may, as in every command but those that tests run.
    with suppress(ValueError):
        signal.signal(signal.SIGTERM, leave)


def visible(text: str) -> str:
    """Return a model's text as it may be shown: on a terminal, what would move its cursor or change it is spelled out.

    What goes to a file or a pipe stays as it is.
    """
    if text.isprintable() or not sys.stdout.isatty():
        return text
    return "".join(repr(one)[1:-1] if _controls(one) else one for one in text)


def _controls(one: str) -> bool:
    return unicodedata.category(one) in ("Cc", "Cf", "Cs") and one not in "\n\t\u200c\u200d"
