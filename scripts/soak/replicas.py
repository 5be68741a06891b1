"""Replicas that go while they are asked: what becomes of the requests, through gRPC's own balancing.

``mixed`` kills one of three replicas and restarts another under mixed traffic: every request ends once. ``rolling``
restarts all of them one after the other: no call fails. ``ray`` sends the mixed traffic through Ray Serve on two nodes,
kills one of them, and adds another one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider import CallError, Client

from scripts.bench.tools.common import code_prompts
from scripts.soak.fleet.account import Account, Errand, Kind, answered_twice, draw_errand, perform
from scripts.soak.fleet.ray_cluster import Cluster, running_cluster
from scripts.soak.fleet.replica_set import ReplicaSet, running_replicas
from scripts.soak.run import check_equal, check_idle
from scripts.soak.traffic import Palette
from scripts.soak.verdict import finish

NUM_REPLICAS = 3
NUM_CLIENTS = 6
# Of the requests, when a replica is killed, and when another one is restarted.
KILL_AT, RESTART_AT = 0.25, 0.6
OPTIONS = ("--threads", "1", "--gamma", "4", "--log-level", "warning")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def code_palette(max_tokens: int) -> Palette:
    """Return choices of requests for code completion."""
    return Palette(prompts=code_prompts(40, num_lines=3), stops=("\n\n", "return", "self", ")"),
                   max_tokens=max_tokens, longest_deadline_s=2.0)  # fmt: skip


def drawn(count: int, max_tokens: int, seed: int) -> list[Errand]:
    """Return so many errands, the same for equal arguments."""
    rng, palette = random.Random(seed), code_palette(max_tokens)
    return [draw_errand(number, palette, rng) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """How replicas are asked.

    Attributes:
        disturb: kills and starts replicas as an account of so many requests grows.
        num_streams: requests under way at a time.
        num_compared: answers that are asked for again.
    """

    disturb: Callable[[Account, int], Coroutine[Any, Any, None]]
    num_streams: int
    num_compared: int


async def run_errands(
    clients: Sequence[Client], errands: Iterable[Errand], num_streams: int, account: Account
) -> None:
    """Keep so many errands under way, those of a stream through one client, until they run out."""
    waiting = iter(errands)

    async def one_stream(client: Client) -> None:
        for errand in waiting:
            account.add(await perform(client, errand))

    turns = itertools.islice(itertools.cycle(clients), num_streams)
    await asyncio.gather(*(one_stream(client) for client in turns))


async def disturb(replicas: ReplicaSet, account: Account, num_requests: int) -> None:
    """Kill a replica and start it again, then drain another one and start that again."""
    killed, restarted, *_ = replicas.replicas
    await account.reached(KILL_AT * num_requests)
    await killed.kill()
    await killed.start()
    await account.reached(RESTART_AT * num_requests)
    await restarted.stop()
    await restarted.start()


async def lose_node(cluster: Cluster, account: Account, num_requests: int) -> None:
    """Kill a node that is not the head, and add another one."""
    await account.reached(KILL_AT * num_requests)
    await asyncio.to_thread(cluster.kill_node, 1)
    await account.reached(RESTART_AT * num_requests)
    await asyncio.to_thread(cluster.add_node)


async def mix(
    clients: Sequence[Client], errands: Sequence[Errand], account: Account, traffic: Traffic
) -> tuple[dict[str, object], list[str]]:
    """Ask while replicas go and come; the figures, and what is wrong."""
    began_s = time.monotonic()
    disturbing = asyncio.create_task(traffic.disturb(account, len(errands)))
    await run_errands(clients, errands, traffic.num_streams, account)
    took_s = time.monotonic() - began_s
    await disturbing
    whole = [one for one in account.finished if one.job.is_determined][: traffic.num_compared]
    num_tokens, unequal = await check_equal(clients[0], whole, traffic.num_streams)
    problems = account.problems(len(errands)) + unequal
    return {
        "requests": len(errands), "streams at a time": traffic.num_streams, "seconds": f"{took_s:.0f}",
        **dict(sorted(account.endings.items())), "answers compared": len(whole), "tokens compared": num_tokens,
    }, problems  # fmt: skip


async def mix_replicas(
    bundle: Path, errands: Sequence[Errand], num_streams: int, num_compared: int
) -> tuple[dict[str, object], list[str]]:
    """Mix over three processes; what they hold in the end, and what two of them have finished, too."""
    async with running_replicas(bundle, NUM_REPLICAS, *OPTIONS) as replicas:
        traffic = Traffic(partial(disturb, replicas), num_streams, num_compared)
        async with Client(replicas.target) as client:
            await client.wait_ready(timeout_s=60)
            figures, problems = await mix([client], errands, Account(), traffic)
        for one in replicas.replicas:
            async with Client(f"127.0.0.1:{one.port}") as client:
                problems += await check_idle(client)
        twice = answered_twice(one.audit for one in replicas.replicas)
    return {**figures, "finished by two replicas, told once": len(twice)}, problems


async def mix_ray(
    cluster: Cluster, errands: Sequence[Errand], num_streams: int, num_compared: int
) -> tuple[dict[str, object], list[str]]:
    """Mix through a cluster's proxies, by clients with connections of their own."""
    async with AsyncExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1),)
        clients = [
            await stack.enter_async_context(Client(cluster.target, options=options)) for _ in range(NUM_CLIENTS)
        ]  # fmt: skip
        traffic = Traffic(partial(lose_node, cluster), num_streams, num_compared)
        return await mix(clients, errands, Account(), traffic)


async def roll(
    replicas: ReplicaSet, palette: Palette, num_streams: int, seed: int
) -> tuple[dict[str, object], list[str]]:
    """Restart every replica while all are asked; the figures, and every call that failed."""
    rng, ends, problems = random.Random(seed), Counter[str](), list[str]()
    is_over = asyncio.Event()

    async def one_stream(client: Client) -> None:
        while not is_over.is_set():
            kind = rng.choices((Kind.GENERATE, Kind.TOKENISE), (80, 20))[0]
            try:
                if kind is Kind.TOKENISE:
                    await client.tokenize("def main(")
                else:
                    max_tokens = rng.randint(1, palette.max_tokens)
                    await client.complete(rng.choice(palette.prompts), max_tokens=max_tokens)
                ends[f"{kind}: finished"] += 1
            except CallError as error:
                ends[f"{kind}: failed"] += 1
                problems.append(repr(error))

    async def restart() -> None:
        for one in replicas.replicas:
            if code := await one.stop():
                problems.append(f"a drained replica ended with exit code {code}")
            await one.start()
        is_over.set()

    async with Client(replicas.target) as client:
        await client.wait_ready(timeout_s=60)
        began_s = time.monotonic()
        await asyncio.gather(restart(), *(one_stream(client) for _ in range(num_streams)))
        took_s = time.monotonic() - began_s
    figures = {
        "streams at a time": num_streams,
        "seconds": f"{took_s:.0f}",
        **dict(sorted(ends.items())),
    }
    return {**figures, "failed calls": len(problems)}, problems


Compared = Annotated[int, typer.Option(help="Answers to ask for again, without drafts.")]


@app.command()
def mixed(
    bundle: Path,
    requests: int = 20_000,
    streams: int = 48,
    max_tokens: int = 24,
    compare: Compared = 2_000,
    seed: int = 0,
) -> None:
    """Ask three replicas of BUNDLE while one is killed and one restarted; exit 1 on any violation."""
    errands = drawn(requests, max_tokens, seed)
    finish("replicas, mixed", *asyncio.run(mix_replicas(bundle, errands, streams, compare)))


@app.command()
def ray(
    bundle: Path,
    requests: int = 20_000,
    streams: int = 48,
    max_tokens: int = 24,
    compare: Compared = 2_000,
    seed: int = 0,
) -> None:
    """Ask BUNDLE through Ray Serve on two nodes while one is killed; exit 1 on any violation."""
    errands = drawn(requests, max_tokens, seed)
    with running_cluster(2) as cluster:
        cluster.deploy(bundle=str(bundle.resolve()), num_cpus=1, num_threads=1, default_gamma=4, max_running=16,
                       min_replicas=2, max_replicas=2)  # fmt: skip
        figures, problems = asyncio.run(mix_ray(cluster, errands, streams, compare))
    finish("replicas, Ray Serve", figures, problems)


@app.command()
def rolling(
    bundle: Path,
    streams: int = 200,
    max_tokens: int = 64,
    max_running: Annotated[
        int, typer.Option(help="Slots of a replica: fewer than streams, so that some wait.")
    ] = 4,
    lb_delay_s: float = 1.0,
    seed: int = 0,
) -> None:
    """Restart three replicas of BUNDLE one after the other under load; exit 1 where a call fails."""
    options = (*OPTIONS, "--lb-delay-s", str(lb_delay_s), "--max-running", str(max_running))

    async def run() -> tuple[dict[str, object], list[str]]:
        async with running_replicas(bundle, NUM_REPLICAS, *options) as replicas:
            return await roll(replicas, code_palette(max_tokens), streams, seed)

    finish("replicas, rolling restart", *asyncio.run(run()))


if __name__ == "__main__":
    app()
