"""Memory over many requests: after 20,000 as after 2,000, within 2 %.

The prefix cache is off unless its size is given: it fills up to its bound, slowly.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import typer
from outrider import Client

from scripts.lab.soak.run import check_idle, tenths
from scripts.lab.soak.server import running_server
from scripts.lab.soak.traffic import Job, Palette, draw_job, drive
from scripts.lab.soak.verdict import finish, resident_mib
from scripts.tools.common import code_prompts

MOST_GROWTH = 0.02
WINDOW = 500
"""Samples of one median, one per request."""


def growth(samples: Sequence[float], warm: int, window: int = WINDOW) -> float:
    """Return the growth from the median before sample ``warm`` to the last one, as a share."""
    early = statistics.median(samples[max(0, warm - window) : warm])
    return statistics.median(samples[-window:]) / early - 1.0


async def drive_all(address: str, pid: int, jobs: Sequence[Job], num_streams: int) -> list[float]:
    """Serve all jobs and return the server's resident MiB after each."""
    samples = list[float]()
    async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
        await client.wait_ready(timeout_s=60)
        await drive(client, jobs, num_streams, lambda _: samples.append(resident_mib(pid)))
        if problems := await check_idle(client):
            raise SystemExit("\n".join(problems))
    return samples


def main(
    bundle: Path,
    requests: int = 20_000,
    warm: int = 2000,
    streams: int = 32,
    max_tokens: int = 12,
    seed: int = 0,
    prefix_cache_bytes: int = 0,
) -> None:
    """Serve many mixed requests, and exit 1 where memory grows by more than 2 % after the first ones."""
    rng = random.Random(seed)
    palette = Palette(prompts=code_prompts(40, num_lines=3), stops=("\n\n", "return", "self", ")"),
                      max_tokens=max_tokens, longest_deadline_s=2.0)  # fmt: skip
    jobs = [draw_job(number, palette, rng) for number in range(requests)]
    options = ("--prefix-cache-bytes", str(prefix_cache_bytes))
    with running_server(bundle, *options) as server:
        samples = asyncio.run(drive_all(server.address, server.pid, jobs, streams))
    share = growth(samples, warm)
    figures = {
        "requests": requests,
        f"growth after {warm}": f"{share:.2%}",
        "MiB by tenths": tenths(samples),
    }
    problem = f"resident memory grew by {share:.2%} after {warm} requests"
    finish("memory", figures, [problem] if share > MOST_GROWTH else [])


if __name__ == "__main__":
    typer.run(main)
