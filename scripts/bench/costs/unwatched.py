"""A server that counts nothing: what ``scripts.bench.costs.watching`` measures against. Its options are the command's.

python -m scripts.bench.costs.unwatched serve BUNDLE --no-access-log --log-level error
"""

from __future__ import annotations

import asyncio

from outrider.runtime.cli.main import app
from outrider.runtime.loop.totals import Totals
from outrider.runtime.serving.watch.metrics import Metrics, StreamCounts
from outrider.runtime.serving.watch.process import LoopLag


def _count_nothing(*_: object) -> None:
    """Do nothing."""


async def _wait(_: LoopLag) -> None:
    await asyncio.Event().wait()


def main() -> None:
    """Run the command without counters."""
    for owner, names in (
        (StreamCounts, ("count",)),
        (Metrics, ("count_queued", "count_answered", "count_speculation")),
        (Totals, ("count_step",)),
    ):
        for name in names:
            setattr(owner, name, _count_nothing)
    LoopLag.watch = _wait
    app()


if __name__ == "__main__":
    main()
