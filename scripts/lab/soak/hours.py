"""Hours of mixed traffic over gRPC and HTTP: memory, tokens per processor second and drafting by tenths of the time.

python -m scripts.lab.soak.hours BUNDLE --hours 2
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import typer
from outrider import CallError, Client
from outrider.client import build_request
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.run import check_idle
from scripts.lab.soak.server import running_server
from scripts.lab.soak.verdict import MIB, finish
from scripts.tools.common import code_prompts

TENTHS = 10
MOST_CHANGE = 0.05
"""Of medians of the last three tenths against tenths three to five, once caches and histories are full."""
EVERY_S = 5.0


@dataclass(slots=True)
class Tally:
    """What has been served so far, and the samples.

    Attributes:
        tokens: of answers.
        drafted: tokens that drafters proposed, of gRPC's answers.
        accepted: of these.
        requests: by protocol; those that failed by their error's name.
        samples: seconds, resident MiB, processor seconds, tokens, drafted, accepted, every few seconds.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    requests: dict[str, int] = field(default_factory=lambda: {"gRPC": 0, "HTTP": 0})
    samples: list[tuple[float, float, float, int, int, int]] = field(default_factory=list)


def of_tree(pid: int) -> tuple[float, float]:
    """Return resident MiB and processor seconds of a process and all below it."""
    first = psutil.Process(pid)
    both = [first, *first.children(recursive=True)]
    times = [one.cpu_times() for one in both]
    resident = sum(one.memory_info().rss for one in both) / MIB
    return resident, sum(one.user + one.system for one in times)


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the answer to a JSON body."""
    headers = {"content-type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=600) as response:
        return json.load(response)


async def one_stream(
    client: Client, url: str, tally: Tally, rng: random.Random, until: float
) -> None:
    """Send requests of mixed lengths and settings, one behind the other, without drafter: ``auto`` chooses."""
    prompts = code_prompts(40, num_lines=12)
    for number in count():
        if time.monotonic() > until:
            return
        text = "\n".join(rng.sample(prompts, rng.choice((1, 1, 1, 4, 12))))
        asked = {
            "max_tokens": rng.choice((8, 32, 32, 64, 128)),
            "temperature": rng.choice((0.0, 0.0, 0.8)),
        }
        try:
            if number % 2:
                answer = await asyncio.to_thread(
                    post, f"{url}/v1/completions", {"prompt": text, **asked}
                )
                tally.tokens += answer["usage"]["completion_tokens"]
                tally.requests["HTTP"] += 1
            else:
                await over_grpc(client, build_request(text, **asked), tally)
        except (CallError, HTTPError) as error:
            name = getattr(error, "reason", "") or type(error).__name__
            tally.requests[str(name)] = tally.requests.get(str(name), 0) + 1


async def over_grpc(client: Client, request: wire.GenerateRequest, tally: Tally) -> None:
    """Stream one answer and count it."""
    async for response in client.generate(request):
        if response.HasField("finish"):
            tally.tokens += response.finish.usage.output_tokens
            tally.drafted += response.finish.speculation.num_drafted
            tally.accepted += response.finish.speculation.num_accepted
    tally.requests["gRPC"] += 1


async def drive(address: str, http_url: str, pid: int, hours: float, streams: int) -> Tally:
    """Serve mixed requests for so long and return what was seen."""
    tally, begin = Tally(), time.monotonic()
    until = begin + hours * 3600

    async def sample() -> None:
        while True:
            values = (tally.tokens, tally.drafted, tally.accepted)
            tally.samples.append((time.monotonic() - begin, *of_tree(pid), *values))
            await asyncio.sleep(EVERY_S)

    async with Client(address) as client:
        await client.wait_ready(timeout_s=600)
        sampler = asyncio.create_task(sample())
        await asyncio.gather(
            *(one_stream(client, http_url, tally, random.Random(n), until) for n in range(streams))
        )
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        if problems := await check_idle(client):
            raise SystemExit("\n".join(problems))
    return tally


def by_tenths(tally: Tally) -> list[dict[str, float]]:
    """Return, per tenth of the samples, the median resident MiB and rates between its ends."""
    size = len(tally.samples) // TENTHS
    rows = []
    for tenth in range(TENTHS):
        part = tally.samples[tenth * size : (tenth + 1) * size + 1]
        (t0, _, cpu0, n0, d0, a0), (t1, _, cpu1, n1, d1, a1) = part[0], part[-1]
        rows.append(
            {
                "MiB": statistics.median(one[1] for one in part),
                "tokens/s": (n1 - n0) / (t1 - t0),
                "tokens per processor second": (n1 - n0) / (cpu1 - cpu0),
                "drafted per token": (d1 - d0) / max(1, n1 - n0),
                "accepted share": (a1 - a0) / max(1, d1 - d0),
            }
        )
    return rows


def change(values: Sequence[float]) -> float:
    """Return how much the last three of ten differ from the third to the fifth, as a share."""
    return statistics.median(values[-3:]) / statistics.median(values[2:5]) - 1.0


def main(bundle: Path, hours: float = 2.0, streams: int = 3, http_port: int = 8123) -> None:
    """Serve mixed requests for hours, and exit 1 where memory or tokens per processor second drift by 5 %."""
    with running_server(bundle, "--http-port", str(http_port)) as server:
        url = f"http://localhost:{http_port}"
        tally = asyncio.run(drive(server.address, url, server.pid, hours, streams))
    rows = by_tenths(tally)
    figures: dict[str, object] = {"hours": hours, "tokens": tally.tokens, **tally.requests}
    for name in rows[0]:
        figures[f"{name}, by tenths"] = " ".join(f"{row[name]:.4g}" for row in rows)
    problems = [
        f"{name} changed by {drift:.1%}"
        for name in ("MiB", "tokens per processor second")
        if abs(drift := change([row[name] for row in rows])) > MOST_CHANGE
    ]
    finish("hours", figures, problems)


if __name__ == "__main__":
    typer.run(main)
