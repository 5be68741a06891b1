"""A client of several replicas: who takes its calls, and what becomes of those of a replica that goes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from outrider import Client, ServerFailed, Unavailable
from outrider.errors import decode_error
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.options import SecurityOptions

from tests.certificates import Authority
from tests.ports import free_ports
from tests.runtime.conftest import Running, Start
from tests.runtime.serving.supervision.test_watchdog import Stuck

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


async def test_a_full_queue_of_a_replica_that_goes_is_served_by_the_others(start: Start) -> None:
    stuck = Stuck()
    async with (
        start(target=stuck, max_batch=1) as going,
        start(max_batch=16) as staying,
        Client(target_of(going, staying)) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        await reach(client, going, staying)
        with stuck.closed():
            holder = asyncio.ensure_future(answer(going.client))
            await asyncio.to_thread(stuck.has_stuck.wait)
            answers = [asyncio.ensure_future(answer(client)) for _ in range(3 * MANY)]
            while going.server.readiness.handler.num_streams <= MANY:
                await going.client.info()
            going.server.hurry()
            draining = asyncio.ensure_future(going.server.drain())
            while not (await going.client.info()).load.is_draining:
                pass
        await draining
        assert await asyncio.gather(*answers) == [1] * (3 * MANY)
        await asyncio.gather(holder, return_exceptions=True)


async def test_no_call_fails_while_three_replicas_are_restarted_one_by_one(start: Start) -> None:
    config = ServerConfig(lb_delay_s=0.1, drain_timeout_s=PATIENCE_S)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    is_over, finishes = asyncio.Event(), list[int]()

    async def serve(address: str) -> Running:
        served = start(config=config, max_batch=2, addresses=[address])
        return await everything.enter_async_context(served)

    async def ask(client: Client) -> None:
        while not is_over.is_set() or len(finishes) < 100:
            stream = client.generate("a", max_tokens=200, temperature=0.0)
            finishes.append(sum([one.HasField("finish") async for one in stream]))

    async with AsyncExitStack() as everything, asyncio.timeout(PATIENCE_S):
        replicas = [await serve(address) for address in addresses]
        client = await everything.enter_async_context(Client("ipv4:" + ",".join(addresses)))
        await client.wait_ready()
        callers = [asyncio.ensure_future(ask(client)) for _ in range(12)]
        for replica, address in zip(replicas, addresses, strict=True):
            assert await replica.server.drain() == 0
            await serve(address)
        is_over.set()
        await asyncio.gather(*callers)
    assert set(finishes) == {1}


async def test_a_list_of_addresses_over_tls_is_called_by_the_certificates_name(
    start: Start, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("replicas")

    def security() -> Security:
        return Security(SecurityOptions(tls_certificate=pair.certificate, tls_key=pair.key))

    trusting = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    named = (("grpc.default_authority", "localhost"),)
    async with (
        start(security=security(), credentials=trusting) as one,
        start(security=security(), credentials=trusting) as other,
        Client(target_of(one, other), tls_ca=authority.ca, options=named) as client,
    ):
        assert (await client.info(timeout_s=PATIENCE_S)).model == "letters"


class Ended(grpc.RpcError):  # type: ignore[misc]
    """A call that a proxy ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_a_lost_replica_behind_rays_proxy_is_unavailable_in_whoevers_words() -> None:
    own = Ended(grpc.StatusCode.UNAVAILABLE, "REPLICA_LOST: the replica is gone; try again")
    rays = "The actor died.\n\tname: SERVE_REPLICA::outrider#Outrider#x\n\tip: 192.0.2.2"
    gone = "The actor 0915fc8e is unavailable: RPC error: recvmsg on 192.0.2.2"
    for ended in (own, *(Ended(grpc.StatusCode.INTERNAL, one) for one in (rays, gone))):
        error = decode_error(ended)
        assert isinstance(error, Unavailable) and error.code == grpc.StatusCode.UNAVAILABLE
        assert error.reason == "REPLICA_LOST" and "192.0.2.2" not in str(error)
    assert type(decode_error(Ended(grpc.StatusCode.INTERNAL, "a bug"))) is ServerFailed
    assert decode_error(Ended(grpc.StatusCode.UNAVAILABLE, "Stream removed")).reason == ""
