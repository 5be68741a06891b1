"""A client of several replicas: who takes its calls, and what becomes of those of a replica that goes."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider import Client

from tests.runtime.conftest import Running, Start

PATIENCE_S = 60.0
# Refused by a replica that goes: more than half of the 100 tokens after which many service configs stop retrying.
MANY = 75


def target_of(*replicas: Running) -> str:
    return "ipv4:" + ",".join(one.address for one in replicas)


def num_admitted(replica: Running) -> int:
    registry = replica.server.metrics.registry
    return int(registry.get_sample_value("outrider_requests_admitted_total") or 0)


async def answer(client: Client, **options: Any) -> int:
    """Return the number of finishes of a request's answer."""
    stream = client.generate("a", max_tokens=3, timeout_s=PATIENCE_S, **options)
    return sum([response.HasField("finish") async for response in stream])


async def reach(client: Client, *replicas: Running) -> None:
    """Ask until each replica has been asked: from then on the client has a connection to each."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(map(num_admitted, replicas)):
            await answer(client)


async def test_calls_go_round_all_replicas(start: Start) -> None:
    async with start() as one, start() as other, Client(target_of(one, other)) as client:
        await client.wait_ready(PATIENCE_S)
        await reach(client, one, other)
        before = num_admitted(one), num_admitted(other)
        assert await asyncio.gather(*(answer(client) for _ in range(20))) == [1] * 20
        assert (num_admitted(one) - before[0], num_admitted(other) - before[1]) == (10, 10)


async def test_a_full_queue_of_a_replica_that_goes_is_served_by_the_others(
    start: Start, start_endless: Start
) -> None:
    async with (
        start_endless(max_batch=1) as going,
        start(max_batch=16) as staying,
        Client(target_of(going, staying)) as client,
    ):
        await reach(client, going, staying)
        holder = going.endless()
        await anext(holder)
        answers = [asyncio.ensure_future(answer(client)) for _ in range(2 * MANY)]
        async with asyncio.timeout(PATIENCE_S):
            while (await going.client.info()).load.num_queued < MANY:
                pass
        going.server.hurry()
        await going.server.drain()
        assert await asyncio.gather(*answers) == [1] * (2 * MANY)
        await holder.aclose()
