"""Serving under load: requests arrive whether or not the server keeps up, and each is timed where a caller would.

Arrivals are Poisson (open loop: a slow answer does not hold back the next request, as a closed loop of clients would),
over gRPC, against a server in its own process. Rates are shares of what the server completes without speculation when
it always has enough to do. At every rate each way of serving meets the same arrivals, prompts
and lengths. Goodput counts requests whose first token and whose mean inter-token time were both within bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from outrider import Client
from outrider.errors import CallError

from scripts.lab.soak.server import running_server
from scripts.tools.common import code_prompts
from scripts.tools.results import Recorder, Row, Scalar
from scripts.tools.tables import show

WAYS: Mapping[str, Mapping[str, object]] = {
    "plain": {"enabled": False},
    "speculative": {"enabled": True},
}
PERCENTILES = (50, 95, 99)
_PROMPTS = 64
_READY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of every rate: their prompts, their number, and half to all of ``max_tokens`` tokens each."""

    prompts: Sequence[str]
    num_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request: seconds after the beginning, prompt, and tokens it asks for."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """When a request was due and when each of its messages came, in seconds of one clock.

    Attributes:
        stamps: arrival time and number of tokens of each message that had tokens.
        is_whole: whether the stream ended with a finish; refused and failed ones did not.
    """

    due_s: float
    stamps: tuple[tuple[float, int], ...]
    is_whole: bool

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.stamps)

    @property
    def ttft_s(self) -> float:
        """Seconds from when the request was due to its first token: a late sender is not excused."""
        return self.stamps[0][0] - self.due_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens, 0 for a single one."""
        later = self.num_tokens - 1
        return (self.stamps[-1][0] - self.stamps[0][0]) / later if later else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed as its caller saw it, waiting included."""
        return self.num_tokens / (self.stamps[-1][0] - self.due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of a good request, in seconds."""

    ttft_s: float
    itl_s: float


def arrivals(traffic: Traffic, rate_per_s: float, seed: int) -> list[Arrival]:
    """A Poisson stream of requests, the same for the same seed."""
    rng = random.Random(seed)
    at_s, made = 0.0, []
    for _ in range(traffic.num_requests):
        at_s += rng.expovariate(rate_per_s)
        wanted = rng.randint(max(1, traffic.max_tokens // 2), traffic.max_tokens)
        made.append(Arrival(at_s=at_s, prompt=rng.choice(traffic.prompts), max_tokens=wanted))
    return made


def figures_of(answers: Sequence[Answer], bounds: Bounds) -> dict[str, Scalar]:
    """Return the figures of the answers to one stream of arrivals; from the first due request to the last token.

    ``fairness`` is Jain's index of the requests' speeds (1: all equal, 1/n: one got everything). ``itl_*`` are over
    requests, ``gap_p99_ms`` over the pauses between messages.
    """
    whole = [answer for answer in answers if answer.is_whole and answer.stamps]
    began_s = min(answer.due_s for answer in answers)
    ended_s = max((answer.stamps[-1][0] for answer in whole), default=math.inf)
    good = [one for one in whole if one.ttft_s <= bounds.ttft_s and one.itl_s <= bounds.itl_s]
    ttft, itl = [one.ttft_s for one in whole], [one.itl_s for one in whole]
    gaps = [
        after[0] - before[0] for one in whole for before, after in itertools.pairwise(one.stamps)
    ]
    wall_s = ended_s - began_s
    return {
        "num_requests": len(answers),
        "completed": len(whole),
        "completed_per_s": len(whole) / wall_s,
        "goodput_per_s": len(good) / wall_s,
        "tokens_per_s": sum(one.num_tokens for one in whole) / wall_s,
        **{f"ttft_p{percent}_ms": percentile_ms(ttft, percent) for percent in PERCENTILES},
        **{f"itl_p{percent}_ms": percentile_ms(itl, percent) for percent in PERCENTILES},
        "gap_p99_ms": percentile_ms(gaps, 99),
        "fairness": jain([one.tokens_per_s for one in whole]),
    }


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed, in milliseconds; None of nothing."""
    if not seconds:
        return None
    return 1e3 * sorted(seconds)[math.ceil(percent / 100 * len(seconds)) - 1]


def jain(speeds: Sequence[float]) -> float | None:
    """Jain's fairness index, (sum x)^2 / (n sum x^2) (Jain, Chiu and Hawe 1984); None of nothing."""
    if not speeds:
        return None
    return sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds))


async def answer(client: Client, request: Arrival, began_s: float, way: str) -> Answer:
    """Wait until a request is due, send it, and take the time of every message."""
    due_s = began_s + request.at_s
    await asyncio.sleep(due_s - time.perf_counter())
    stamps, is_whole = [], False
    try:
        stream = client.generate(
            request.prompt, max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, speculation=WAYS[way]
        )  # fmt: skip
        async for response in stream:
            if response.tokens:
                stamps.append((time.perf_counter(), len(response.tokens)))
            is_whole = response.HasField("finish")
    except CallError:
        is_whole = False  # counted as not completed
    return Answer(due_s=due_s, stamps=tuple(stamps), is_whole=is_whole)


async def send(client: Client, requests: Sequence[Arrival], way: str) -> list[Answer]:
    """Send every request when it is due, whatever became of the others."""
    began_s = time.perf_counter()
    return await asyncio.gather(*(answer(client, one, began_s, way) for one in requests))


async def saturation(client: Client, requests: Sequence[Arrival], way: str) -> float:
    """Requests per second when all are there at once."""
    at_once = [Arrival(at_s=0.0, prompt=one.prompt, max_tokens=one.max_tokens) for one in requests]
    answers = await send(client, at_once, way)
    unbounded = Bounds(ttft_s=math.inf, itl_s=math.inf)
    return float(figures_of(answers, unbounded)["completed_per_s"] or 0.0)


async def sweep(
    address: str, traffic: Traffic, shares: Sequence[float], bounds: Bounds
) -> tuple[list[Row], float]:
    """Return every way's figures at every rate, the ways in alternating order.

    Args:
        address: of the server.
        traffic: what is asked at each rate.
        shares: rates, as shares of the saturation of the first way.
        bounds: of a good request.

    Returns:
        A row per rate and way, and the saturation in requests per second.
    """
    rows = []
    async with Client(address) as client:
        await client.wait_ready(timeout_s=_READY_S)
        warm = arrivals(traffic, 1.0, seed=0)
        for way in reversed(WAYS):
            await saturation(client, warm[: len(warm) // 4 + 1], way)
        full_per_s = await saturation(client, warm, next(iter(WAYS)))
        for number, rate in enumerate(share * full_per_s for share in shares):
            stream = arrivals(traffic, rate, seed=number + 1)
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                answers = await send(client, stream, way)
                case: dict[str, Scalar] = {"offered_per_s": rate, "way": way}
                rows.append(Row(case=case, figures=figures_of(answers, bounds)))
    return rows, full_per_s


def main(
    bundle: Path,
    shares: Annotated[
        str, typer.Option(help="rates, as shares of the saturation without speculation")
    ] = "0.25,0.5,0.75,0.9,1,1.2",
    requests: Annotated[int, typer.Option(min=2, help="per rate and way")] = 100,
    max_tokens: int = 64,
    max_running: Annotated[int, typer.Option(help="slots of the server")] = 8,
    ttft_ms: Annotated[float, typer.Option(help="bound of a good request")] = 1000.0,
    itl_ms: Annotated[float, typer.Option(help="bound of a good request")] = 100.0,
    gamma: Annotated[str, typer.Option(help="of the server: a number, or auto")] = "auto",
    costs: Annotated[Path, typer.Option(help="folder for measured step costs")] = Path("costs"),
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Offer rising rates to a server, plain and speculative in turn."""
    recorder = Recorder("serving", "open-loop Poisson arrivals over gRPC", threads)
    bounds = Bounds(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3)
    wanted = [float(share) for share in shares.split(",")]
    options = (
        "--max-running", str(max_running), "--max-queued", str(max(256, requests)), "--threads", str(threads),
        "--gamma", gamma, "--costs", str(costs.resolve()), "--queue-timeout-s", "600",
    )  # fmt: skip
    traffic = Traffic(prompts=code_prompts(_PROMPTS), num_requests=requests, max_tokens=max_tokens)
    with running_server(bundle, *options) as server:
        rows, full_per_s = asyncio.run(sweep(server.address, traffic, wanted, bounds))
    show(rows, f"{bundle.name}: open-loop arrivals")
    settings: dict[str, Scalar] = {
        "bundle": bundle.name, "requests": requests, "max_tokens": max_tokens, "max_running": max_running,
        "ttft_bound_ms": ttft_ms, "itl_bound_ms": itl_ms, "gamma": gamma, "saturation_plain_per_s": full_per_s,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
