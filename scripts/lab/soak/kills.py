"""Kills the engine of a server again and again under load: no stream may end without a word, and service comes back.

The server runs with ``--isolate-engine``. A stream ends well, or with ENGINE_RESTART; answers that ended well and are
determined by their request must be those of an undisturbed engine. Service is back when a request is answered again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import typer
from outrider import CallError, Client

from scripts.lab.soak.run import broken_answer, check_equal, check_idle
from scripts.lab.soak.server import running_server
from scripts.lab.soak.traffic import Fate, Job, Outcome, Palette, draw_job, send
from scripts.tools.common import code_prompts

SILENT_S = 120.0
"""A stream that has not ended after so long is silent."""
REASON = "ENGINE_RESTART"
# Every ending is to be seen: no call is sent twice, and none is refused for health's sake before it is sent.
OPTIONS = (("grpc.enable_retries", 0), ("grpc.service_config", "{}"))


@dataclass(slots=True)
class Killed:
    """What became of a server whose engine was killed.

    Attributes:
        back_s: per kill, seconds until a request was answered again.
        outcomes: of all requests.
        problems: what is wrong, a line each.
    """

    back_s: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def endings(self) -> Counter[str]:
        """Requests by the way they ended."""
        return Counter(
            "finished" if one.error is None else f"{one.error.reason or one.error.code}"
            for one in self.outcomes
        )


def engine_of(server_pid: int) -> int:
    """Return the process id of the engine that a server has at present.

    Raises:
        RuntimeError: it has none, or several.
    """
    children = psutil.Process(server_pid).children()
    if len(children) != 1:
        raise RuntimeError(f"the server has {len(children)} processes instead of an engine's")
    return int(children[0].pid)


async def answered_again(client: Client) -> float:
    """Ask until a request is answered, and return the seconds it took."""
    began_s = time.monotonic()
    while True:
        try:
            async for _ in client.generate("def", max_tokens=1, timeout_s=SILENT_S):
                pass
        except CallError:
            await asyncio.sleep(0.02)
        else:
            return time.monotonic() - began_s


async def kill_engines(
    address: str, server_pid: int, jobs: Iterable[Job], num_kills: int, num_streams: int
) -> Killed:
    """Kill the engine so many times while streams are under way, and return what their clients saw.

    Args:
        address: of the server.
        server_pid: its process.
        jobs: endless; read to their end.
        num_kills: engines to kill.
        num_streams: requests under way at a time.
    """
    killed, waiting = Killed(), iter(jobs)
    rng = random.Random(num_kills)
    is_over, is_back = asyncio.Event(), asyncio.Event()
    is_back.set()
    ended: asyncio.Queue[None] = asyncio.Queue()

    async def one_stream(client: Client) -> None:
        while not is_over.is_set():
            await is_back.wait()
            killed.outcomes.append(await send(client, replace(next(waiting), deadline_s=SILENT_S)))
            ended.put_nowait(None)

    async def killer(client: Client) -> None:
        for _ in range(num_kills):
            # Some streams have begun by then, some have not.
            for _ in range(rng.randint(1, num_streams)):
                await ended.get()
            is_back.clear()
            os.kill(engine_of(server_pid), signal.SIGKILL)
            killed.back_s.append(await answered_again(client))
            is_back.set()
        is_over.set()

    async with Client(address, options=OPTIONS) as client:
        await asyncio.gather(killer(client), *(one_stream(client) for _ in range(num_streams)))
        killed.problems += [problem for one in killed.outcomes if (problem := broken(one))]
        killed.problems += await check_idle(client)
        whole = [one for one in killed.outcomes if one.error is None]
        killed.problems += (await check_equal(client, whole, num_streams))[1]
    return killed


def broken(outcome: Outcome) -> str | None:
    """Return the fault of an ending, or None."""
    error = outcome.error
    if error is not None and error.reason == REASON and not outcome.finishes:
        return None
    return broken_answer(outcome)


def check_back(back_s: Iterable[float], start_s: float) -> list[str]:
    """Return what is wrong with the seconds until service was back, for a server that starts in ``start_s``."""
    num_late = sum(one > start_s for one in back_s)
    return [f"service came back later than a server starts, {num_late} times"] if num_late else []


def endless_jobs(palette: Palette, seed: int) -> Iterator[Job]:
    """Requests with a bit of everything, all read to their end."""
    rng, number = random.Random(seed), 0
    while True:
        yield replace(draw_job(number, palette, rng), fate=Fate.FINISH, deadline_s=None)
        number += 1


def main(bundle: Path, kills: int = 100, streams: int = 16, max_tokens: int = 48) -> None:
    """Kill the engine of a server of BUNDLE again and again; exit 1 on any violation."""
    palette = Palette(prompts=code_prompts(40, num_lines=3), stops=("\n\n", "return", "self", ")"),
                      max_tokens=max_tokens)  # fmt: skip
    began_s = time.monotonic()
    with running_server(bundle, "--isolate-engine") as server:
        start_s = time.monotonic() - began_s
        jobs = endless_jobs(palette, seed=0)
        killed = asyncio.run(kill_engines(server.address, server.pid, jobs, kills, streams))
    back_s = sorted(killed.back_s)
    problems = killed.problems + check_back(back_s, start_s)
    median_s = statistics.median(back_s)
    typer.echo(
        f"{kills} kills, {len(killed.outcomes)} requests: {dict(killed.endings)}; the server started in "
        f"{start_s:.2f} s, service was back after {median_s:.2f} s (median), at most {back_s[-1]:.2f} s"
    )
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
