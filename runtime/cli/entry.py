"""The ``outrider`` command's first lines: they run without the client, so that its absence is said in one line."""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata, util

EXIT_INCOMPLETE = 1


def main() -> None:
    """Run the command, or say which distribution is missing."""
    if os.getpid() == 1:
        # To the first process of a container a signal without a handler is lost; imports take a while.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if util.find_spec("outrider.client") is None:
        print(
            f"outrider: the distribution 'outrider' (the client) is not installed, and the server needs it: "
            f"pip install --find-links WHEELS 'outrider=={version()}'",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_INCOMPLETE)
    from outrider.runtime.cli.main import app

    app()


def version() -> str:
    """Return the version of the installed server; "unknown" in a checkout that is not installed."""
    try:
        return metadata.version("outrider-server")
    except metadata.PackageNotFoundError:
        return "unknown"
