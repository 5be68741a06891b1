"""Mixed traffic at full load against a real server: every request answered once, exactly, and nothing leaks.

Greedy and seed-stable requests, whatever else they ask for, are sent again with speculation off afterwards and must
give the same tokens. Requests that were cut short (cancelled, aborted, out of time) must have given a prefix of them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
from outrider import CallCancelled, Client, DeadlineExceeded
from outrider.v1 import inference_pb2 as wire
from rich.console import Console
from rich.table import Table

from scripts.lab.soak.server import running_server
from scripts.lab.soak.traffic import Fate, Job, Outcome, Palette, draw_job, drive
from scripts.tools.common import code_prompts

MIB = 1 << 20
WARM, MOST_GROWTH_MIB = 500, 16.0
"""Requests before memory is watched, and what it may grow by from then on."""


def broken_answer(outcome: Outcome) -> str | None:
    """Return the fault of an answer taken by itself, or None."""
    job, error = outcome.job, outcome.error
    name = job.request.request_id
    if outcome.was_left:
        return None
    is_clients_deadline = isinstance(error, DeadlineExceeded) and not error.reason
    if job.fate is Fate.EXPIRE and is_clients_deadline and outcome.finishes:
        error = None  # it passed between the answer's end and the call's
    if len(outcome.finishes) + (error is not None) != 1:
        return f"{name}: {len(outcome.finishes)} finishes, error {error}"
    if error is not None:
        is_due = (job.fate is Fate.EXPIRE and isinstance(error, DeadlineExceeded)) or (
            job.fate is Fate.ABORT
            and isinstance(error, CallCancelled)
            and error.reason == "ABORTED_BY_RPC"
        )
        return None if is_due else f"{name}: ended with {error!r}, but was to be {job.fate}"
    finish = outcome.finishes[0]
    if not finish.usage.output_tokens == len(outcome.tokens) <= job.request.max_tokens:
        return f"{name}: {len(outcome.tokens)} tokens, {finish.usage.output_tokens} counted"
    if job.request.HasField("logprobs"):
        wanted = job.request.logprobs
        if not all(t.HasField("logprob") and len(t.top) == wanted for t in outcome.tokens):
            return f"{name}: log-probabilities are missing"
    return None


def unequal_answer(outcome: Outcome, plain: Outcome) -> str | None:
    """Return the difference from plain decoding of the same request, or None."""
    name, ids = outcome.job.request.request_id, outcome.ids
    if ids != plain.ids[: len(ids)]:
        return f"{name}: tokens {ids}, without speculation {plain.ids}"
    if outcome.finishes and (len(ids) != len(plain.ids) or outcome.text != plain.text):
        return f"{name}: text {outcome.text!r}, without speculation {plain.text!r}"
    return None


async def check_equal(
    client: Client, outcomes: Sequence[Outcome], num_streams: int
) -> tuple[int, list[str]]:
    """Send every determined request again with speculation off.

    Returns:
        Number of tokens compared, and what is wrong.
    """
    determined = {one.job.request.request_id: one for one in outcomes if one.job.is_determined}
    plain = await drive(client, (one.job.plain() for one in determined.values()), num_streams)
    problems = [problem for one in plain if (problem := broken_answer(one))]
    by_name = {one.job.request.request_id.removesuffix("-plain"): one for one in plain}
    differences = (unequal_answer(one, by_name[name]) for name, one in determined.items())
    num_compared = sum(len(one.ids) for one in determined.values())
    return num_compared, problems + [problem for problem in differences if problem]


async def check_idle(client: Client) -> list[str]:
    """Return what a server without requests still holds; it gets five seconds to notice cancellations."""
    deadline = time.monotonic() + 5.0
    while True:
        load = (await client.info()).load
        if load.num_free_slots == load.num_slots and not load.num_running + load.num_queued:
            return []
        if time.monotonic() > deadline:
            return [f"slots are held without requests: {load}".replace("\n", ", ")]


def check_memory(
    resident_mib: Sequence[float], warm: int, most_mib: float
) -> tuple[float, float, list[str]]:
    """Medians of resident memory after the warm-up and at the end, each over a tenth of the rest, and what is wrong."""
    rest = resident_mib[warm:]
    window = max(1, len(rest) // 10)
    early, late = statistics.median(rest[:window]), statistics.median(rest[-window:])
    problem = f"resident memory grew from {early:.1f} to {late:.1f} MiB"
    return early, late, [problem] if late - early > most_mib else []


def tenths(values: Sequence[float]) -> str:
    """Medians of ten equal stretches, or of fewer where there are fewer values."""
    size = max(1, -(-len(values) // 10))
    parts = (values[at : at + size] for at in range(0, len(values), size))
    return " ".join(f"{statistics.median(part):.0f}" for part in parts)


async def soak(
    address: str, pid: int, jobs: Iterable[Job], num_streams: int
) -> tuple[Table, list[str]]:
    """Drive a server and check everything; the figures and what is wrong."""
    process, resident_mib = psutil.Process(pid), list[float]()

    def sample(_: int) -> None:
        resident_mib.append(process.memory_info().rss / MIB)

    async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
        await client.wait_ready(timeout_s=60)
        began = time.monotonic()
        outcomes = await drive(client, jobs, num_streams, sample)
        took_s = time.monotonic() - began
        problems = await check_idle(client)
        num_compared, unequal = await check_equal(client, outcomes, num_streams)
        problems += unequal + await check_idle(client)
    problems += [problem for one in outcomes if (problem := broken_answer(one))]
    warm = min(WARM, len(outcomes) // 2)
    early, late, grown = check_memory(resident_mib, warm, MOST_GROWTH_MIB)
    num_tokens = sum(len(one.tokens) for one in outcomes)
    rows: dict[str, object] = {
        "requests": len(outcomes), "streams at a time": num_streams, "seconds": f"{took_s:.0f}",
        "output tokens": num_tokens, "tokens/s": f"{num_tokens / took_s:.0f}",
        **{f"ended: {ending}": count for ending, count in sorted(endings(outcomes).items())},
        "compared with speculation off": sum(one.job.is_determined for one in outcomes),
        "tokens compared": num_compared,
        f"resident MiB after {warm} requests": f"{early:.1f}",
        "resident MiB at the end": f"{late:.1f}",
        "resident MiB by tenths of the run": tenths(resident_mib), "violations": len(problems + grown),
    }  # fmt: skip
    table = Table("figure", "value", title="soak")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table, problems + grown


def endings(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count the requests by the way they ended."""
    return Counter(
        "left by the client" if one.was_left
        else type(one.error).__name__ if one.error is not None
        else wire.FinishReason.Name(one.finishes[0].reason) if one.finishes else "nothing"
        for one in outcomes
    )  # fmt: skip


def main(
    bundle: Path,
    requests: int = 2000,
    streams: int = 64,
    max_tokens: Annotated[int, typer.Option(help="of one request, at most")] = 24,
    seed: int = 0,
) -> None:
    """Soak a server process of BUNDLE and exit 1 on any violation."""
    rng = random.Random(seed)
    palette = Palette(prompts=code_prompts(40, num_lines=3), stops=("\n\n", "return", "self", ")"),
                      max_tokens=max_tokens, longest_deadline_s=2.0)  # fmt: skip
    jobs = (draw_job(number, palette, rng) for number in range(requests))
    with running_server(bundle) as server:
        table, problems = asyncio.run(soak(server.address, server.pid, jobs, streams))
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False)
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
