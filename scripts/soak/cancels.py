"""Cancelled requests: a caller leaves at any moment, and no slot stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import cast

import typer
from outrider import CallError, Client
from outrider.v1 import inference_pb2 as wire

from scripts.bench.tools.common import code_prompts
from scripts.soak.run import check_idle
from scripts.soak.server import running_server
from scripts.soak.traffic import Job, Palette, draw_job
from scripts.soak.verdict import finish

NUM_STREAMS = 64
MOST_TURNS = 400
"""Turns of the client's loop after which it leaves, at most, where it does not wait for responses first."""
Stream = AsyncGenerator[wire.GenerateResponse]


async def cancel_all(
    address: str, jobs: Iterator[Job], rng: random.Random, num_streams: int = NUM_STREAMS
) -> tuple[dict[str, int], list[str]]:
    """Begin every job and leave it, at a drawn moment or after some responses; the figures, and the slots kept."""
    figures = {"sent": 0, "ended first": 0}
    async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
        await client.wait_ready(timeout_s=60)

        async def read(request: wire.GenerateRequest, most: int | None) -> None:
            async with aclosing(cast("Stream", client.generate(request))) as responses:
                count = 0
                async for _ in responses:
                    count += 1
                    if count == most:
                        return
            figures["ended first"] += 1

        async def one_stream() -> None:
            for job in jobs:
                most = rng.choice((None, 1, 2, 3))
                reading = asyncio.ensure_future(read(job.request, most))
                for _ in range(rng.randint(0, MOST_TURNS) if most is None else 0):
                    await asyncio.sleep(0)
                if most is None:
                    reading.cancel()
                figures["sent"] += 1
                with suppress(asyncio.CancelledError, CallError):
                    await reading

        await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    # Where many streams were reset, gRPC refuses some new ones: this client tries again.
    async with Client(address) as client:
        return figures, await check_idle(client)


def main(bundle: Path, cancels: int = 5000, max_tokens: int = 24, seed: int = 0) -> None:
    """Cancel requests to a server process of BUNDLE, and exit 1 where a slot is kept."""
    rng = random.Random(seed)
    palette = Palette(
        prompts=code_prompts(40, num_lines=3), stops=("\n\n", "self"), max_tokens=max_tokens
    )
    jobs = (draw_job(number, palette, rng) for number in range(cancels))
    with running_server(bundle) as server:
        figures, problems = asyncio.run(cancel_all(server.address, jobs, rng))
    finish("cancels", figures, problems)


if __name__ == "__main__":
    typer.run(main)
