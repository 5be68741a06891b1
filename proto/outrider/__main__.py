"""``python -m outrider`` is the command ``outrider``, which comes with the server's distribution."""

from __future__ import annotations

import sys

from outrider.absent import has_server

if not has_server():
    sys.exit("outrider: the command comes with the server: pip install 'outrider-server[cpu]'")
from outrider.runtime.cli.entry import main

main()
