"""Whether a caller finds out by time which grammars another tenant has asked for: 1,000 pairs of requests.

    python -m scripts.lab.soak.grammars BUNDLE

Of each pair one grammar was another tenant's a moment ago, and one is new to everybody; which comes first is drawn. A
control repeats the caller's own grammars, which must show.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from outrider import Client

from scripts.lab.soak.server import running_server
from scripts.lab.soak.verdict import finish

MOST_DEVIATIONS = 3.0
"""Of chance, which a sound server exceeds once in 370 runs."""


async def timed(client: Client, regex: str) -> float:
    """Return the milliseconds until an answer of one token has come."""
    began_s = time.perf_counter()
    async for _ in client.generate("a", max_tokens=1, temperature=0.0, regex=regex):
        pass
    return (time.perf_counter() - began_s) * 1e3


def grammar(number: int) -> str:
    """Return a regular expression of its own, which takes some milliseconds to compile."""
    return f"[a-m]{{1,{number % 50 + 10}}}|x{number}[0-9a-f]{{8,40}}"


async def measure(address: str, num_pairs: int, seed: int) -> tuple[list[float], list[float]]:
    """Return, of each pair, how much longer the new grammar took than the other's, and than the caller's own."""
    rng, others, own = random.Random(seed), list[float](), list[float]()
    async with Client(address, tenant="victim") as victim, Client(address, tenant="spy") as spy:
        await spy.wait_ready(timeout_s=60)
        for number in range(100):
            await timed(spy, grammar(-1 - number))
        for number in range(num_pairs):
            known, new = grammar(3 * number), grammar(3 * number + 1)
            await timed(victim, known)
            took = {one: await timed(spy, one) for one in rng.sample((known, new), 2)}
            others.append(took[new] - took[known])
            own.append(took[new] - await timed(spy, known))
    return others, own


def deviations(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, how often it was above 0, and by how many standard deviations that differs from a half."""
    share = sum(one > 0.0 for one in differences) / len(differences)
    sigma = 0.5 / math.sqrt(len(differences))
    return statistics.median(differences), share, (share - 0.5) / sigma


def main(bundle: Path, pairs: int = 1000, seed: int = 0) -> None:
    """Print what shows, and exit 1 where another tenant's grammars do, or the caller's own do not."""
    with running_server(bundle) as server:
        found = asyncio.run(measure(server.address, pairs, seed))
    figures, shown = dict[str, object](), list[float]()
    for name, differences in zip(("another tenant's", "own"), found, strict=True):
        median, share, sigmas = deviations(differences)
        shown.append(abs(sigmas))
        figures[f"{name}: quicker than new ones by, ms (median)"] = f"{median:.3f}"
        figures[f"{name}: share of quicker ones, deviations from a half"] = (
            f"{share:.3f} ({sigmas:+.1f})"
        )
    problems = ["another tenant's grammars show by time"] * (shown[0] > MOST_DEVIATIONS)
    problems += ["the control shows nothing"] * (shown[1] <= MOST_DEVIATIONS)
    finish("grammars", figures, problems)


if __name__ == "__main__":
    typer.run(main)
