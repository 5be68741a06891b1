"""``python -m outrider.runtime.cli`` is the command ``outrider``."""

from outrider.runtime.cli.entry import main

main()
