"""Doors, measured: ``python -m scripts.bench.doors.run BUNDLE``.

What authentication costs per request, by kind; calls that fail while a certificate is replaced; what a tenant gets that
asks for ten times its quota, and how much later another one's answers begin; how soon a hopeless deadline is refused.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from scripts.bench.doors.authentication import BOUND_MS, checks, servers
from scripts.bench.doors.papers import Papers
from scripts.bench.doors.shares import (
    MOST_REFUSAL_MS,
    MOST_SHARE,
    MOST_SLOWER,
    hopeless,
    quotas,
)
from scripts.bench.doors.swap import swaps
from scripts.bench.tools.common import names_of
from scripts.bench.tools.results import Recorder, Row, Scalar
from scripts.bench.tools.tables import show

PARTS = ("checks", "servers", "swaps", "quotas", "hopeless")


def main(
    bundle: Path,
    only: Annotated[str, typer.Option(help="comma-separated parts; default all")] = "",
    calls: Annotated[int, typer.Option(min=1, help="per kind of authentication")] = 5000,
    rounds: Annotated[int, typer.Option(min=1, help="of servers")] = 5,
    num_swaps: Annotated[int, typer.Option("--swaps", min=1, help="of certificates")] = 10,
    seconds: Annotated[float, typer.Option(help="of each stream of requests")] = 60.0,
    max_tokens: int = 32,
    max_running: Annotated[int, typer.Option(help="slots of the server with quotas")] = 8,
    probes: Annotated[int, typer.Option(min=1, help="deadlines without hope")] = 200,
    json_out: Path | None = None,
) -> None:
    """Measure the parts in turn, and print their figures beside their bounds."""
    wanted = names_of(only, PARTS) or PARTS
    recorder = Recorder("doors.run", "what doors cost, and what they keep", 2)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        papers = Papers(folder)
        if "checks" in wanted:
            rows += checks(papers, calls)
        if "servers" in wanted:
            rows += servers(bundle, papers, calls, rounds)
        if "swaps" in wanted:
            rows += swaps(bundle, papers, num_swaps)
        if "quotas" in wanted:
            rows.append(quotas(bundle, folder, seconds, max_tokens, max_running))
        if "hopeless" in wanted:
            rows.append(hopeless(bundle, probes, max_tokens))
    for figure in dict.fromkeys(row.case["figure"] for row in rows):
        show([row for row in rows if row.case["figure"] == figure], str(figure))
    typer.echo(
        f"bounds: authentication {BOUND_MS} ms; no failed call; {MOST_SHARE} of the quota, and {MOST_SLOWER} times the "
        f"other's time to a first token; refusals within {MOST_REFUSAL_MS:.0f} ms"
    )
    settings: dict[str, Scalar] = {
        "bundle": bundle.name, "seconds": seconds, "max_tokens": max_tokens, "max_running": max_running,
        "rounds": rounds,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
