"""``python -m outrider`` is the command ``outrider``, which comes with the server's distribution."""

from __future__ import annotations

import sys

from outrider.absent import has_server, import_of_server

if not has_server():
    sys.exit("outrider: the command comes with the server: pip install 'outrider-server[cpu]'")
import_of_server("outrider.runtime.cli.entry", "main", extra="cpu")()
