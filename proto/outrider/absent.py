"""Names of the server's distribution that the client's gives, where both are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any


def has_server() -> bool:
    """Return whether the server's distribution is installed; imports nothing of it."""
    return find_spec("outrider.runtime") is not None


def import_of_server(module: str, name: str, *, extra: str) -> Any:
    """Return a name of a module of the distribution ``outrider-server``.

    Raises:
        ImportError: it is not installed, or without its ``extra``; says how to install it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"outrider: {name} needs the distribution 'outrider-server' ({error.name} is missing): "
            f"pip install 'outrider-server[{extra}]'",
            name=error.name,
        ) from error
