"""Strangers keep nobody out: they hold few of the places, and leave first."""

from __future__ import annotations

import asyncio
import itertools
import select
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security import places
from outrider.runtime.serving.security.options import SecurityOptions
from outrider.runtime.serving.security.places import Held, Places, is_within, leaving

from tests.http2 import PREFACE, SETTINGS, connect, frame
from tests.mutants import assert_caught
from tests.runtime.markov import Clock

GREETING = PREFACE + frame(SETTINGS)
PATIENCE_S = 60.0
MOST = 320


def held(host: str, number: int, used_s: float, *, is_known: bool = False) -> Held:
    peer = f"ipv4:{host}:{number}"
    return Held(peer=peer, host=f"ipv4:{host}", is_known=is_known, used_s=used_s)


def fleet(num: int, host: str = "10.0.0.1") -> list[Held]:
    return [held(host, number, float(number), is_known=True) for number in range(num)]


def check_one_address() -> None:
    """A 32nd for the strangers of one address, and the oldest leave."""
    strangers = [held("10.0.0.9", number, float(-number)) for number in range(50)]
    gone = leaving([*fleet(200), *strangers], MOST)
    assert {one.peer for one in gone} == {one.peer for one in strangers[10:]}


def check_many_addresses() -> None:
    """A half for all strangers together."""
    strangers = [held(f"10.0.{n // 5}.9", n, float(n)) for n in range(200)]
    gone = leaving(strangers, MOST)
    assert [one.used_s for one in gone] == [float(n) for n in range(40)]


def check_room() -> None:
    """Where room is short strangers leave, then the longest idle of the address that has the most."""
    strangers = [held(f"10.0.{n}.9", n, 1000.0 + n) for n in range(8)]
    known = [*fleet(200), *fleet(100, "10.0.0.2")]
    gone = leaving([*strangers, *known], MOST)
    assert len(known) == 300 and gone == strangers
    more = [*known, *fleet(10, "10.0.0.3")]
    gone = leaving([*strangers, *more], MOST)
    assert gone[:8] == strangers and gone[8:] == known[:10]


@pytest.mark.parametrize("most", [1, 2, 8, 16, 64])
def test_however_few_the_places_whoever_fits_keeps_one(most: int) -> None:
    assert leaving(fleet(most - most // 16), most) == []
    strangers = [
        held("10.0.0.9", number, float(number)) for number in range(min(8, max(1, most // 2)))
    ]
    assert leaving(strangers, most) == []


async def test_a_look_without_a_file_to_look_with_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([OSError(24, "Too many open files"), 3, KeyError("enough")])
    closed: list[int] = []

    def look(most: object) -> int:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    watched = Places()
    monkeypatch.setattr(watched, "look", look)
    monkeypatch.setattr(places, "EVERY_S", 0.0)
    with pytest.raises(KeyError, match="enough"):
        await watched.watch({}, closed.append)
    assert closed == [3]


def test_strangers_of_one_address_have_few_places() -> None:
    check_one_address()


def test_strangers_have_half_of_the_places() -> None:
    check_many_addresses()


def test_where_room_is_short_strangers_leave_first() -> None:
    check_room()


@pytest.mark.parametrize(
    ("host", "network", "is_inside"),
    [
        ("ipv4:10.1.2.3", "10.0.0.0/8", True),
        ("ipv4:11.1.2.3", "10.0.0.0/8", False),
        ("ipv4:10.1.2.3", "10.1.2.3", True),
        ("ipv6:%5Bfd00::1%5D", "fd00::/8", True),
        ("ipv6:%5Bfe80::1%25eth0%5D", "fd00::/8", False),
        ("ipv6:%5Bfd00::1%5D", "10.0.0.0/8", False),
    ],
)
def test_a_host_belongs_to_a_network(host: str, network: str, is_inside: bool) -> None:
    assert is_within(host, SecurityOptions(trusted_proxies=(network,)).proxies) is is_inside


def test_connections_of_a_trusted_proxy_have_no_share_of_an_address() -> None:
    """They are the places' own sockets here: a listener with more connections than one address may have."""
    for proxies, num_left in ((), 8), (("127.0.0.0/8", "::1"), 15):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            taken = [listener.accept()[0] for _ in clients]
            watched = Places(proxies=SecurityOptions(trusted_proxies=proxies).proxies)
            assert watched.look({port: 16}) == 20 - num_left
            for one in (*clients, *taken):
                one.close()


def test_a_proxy_is_an_address_or_a_network() -> None:
    with pytest.raises(ConfigError, match="trusted_proxies: must be addresses or networks"):
        SecurityOptions(trusted_proxies=("proxy.example",))


def test_a_fleet_that_was_let_in_loses_no_place() -> None:
    assert not leaving(fleet(2000), 4096)
    assert not leaving(fleet(300), MOST)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_of[one.host] > max(LEAST_OF_HOST, most // 32) or", ""),
        ("num_left > max(1, most // 2)", "False"),
        ("rest.sort(key=lambda one: (one.is_known,", "rest.sort(key=lambda one: (0,"),
        ("oldest = sorted(held, key=lambda one: one.used_s)", "oldest = [*held]"),
        ("(most - most // 16)", "most"),
    ],
    ids=["no share of an address", "no share of strangers", "no order", "any age", "no reserve"],
)
def test_mistakes_are_caught(monkeypatch, old, new) -> None:
    def killer() -> None:
        check_one_address()
        check_many_addresses()
        check_room()

    assert_caught(monkeypatch, places, old, new, killer)


def test_only_connections_of_the_ports_are_closed() -> None:
    """Of two listeners of this process one is looked after; files that are no connections are left alone."""
    clock = Clock()
    looked = Places(clock)
    with (
        socket.create_server(("127.0.0.1", 0)) as ours,
        socket.create_server(("127.0.0.1", 0)) as others,
    ):
        ends = []
        for listening in (ours, others):
            for _ in range(4):
                client = socket.create_connection(listening.getsockname())
                ends.append((client, listening.accept()[0]))
                clock.now += 1.0
        port = ours.getsockname()[1]
        host, its_port = ends[1][0].getsockname()
        looked.let_in(f"ipv4:{host}:{its_port}")
        assert looked.look({port: 4}) == 1
        strangers = [client for client, _ in ends[:4] if client is not ends[1][0]]
        closed, _, _ = select.select(strangers, [], [], 10.0)
        assert len(closed) == 1 and all(client.recv(1) == b"" for client in closed)
        for client, server in (ends[1], *ends[4:]):
            server.send(b"x")
            assert client.recv(1) == b"x"
        for pair in ends:
            for one in pair:
                one.close()
        assert looked.look({port: 4}) == 0
        assert not looked._let_in


def check_a_long_call() -> None:
    """Who streams a long answer is not idle: of two callers the other one leaves, though he called later."""
    clock = Clock()
    looked = Places(clock)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ends = []
        for _ in range(2):
            client = socket.create_connection(listening.getsockname())
            ends.append((client, listening.accept()[0]))
        peers = ["ipv4:{}:{}".format(*client.getsockname()) for client, _ in ends]
        for peer in peers:
            clock.now += 1.0
            looked.let_in(peer)
        looked.left(peers[1])
        clock.now += 1.0
        closed = looked.look({port: 1})
        gone, _, _ = select.select([client for client, _ in ends], [], [], 10.0)
        for end in (one for pair in ends for one in pair):
            end.close()
        assert closed == 1 and gone == [ends[1][0]]
        looked.look({port: 1})
        looked.left(peers[0])
        assert not looked._let_in and not looked._num_calls


def test_a_caller_whose_answer_goes_on_is_not_idle() -> None:
    check_a_long_call()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("now_s if peer in busy else ", ""),
        ("self._num_calls[peer] -= 1", "pass"),
        ("if peer in self._let_in:", "if True:"),
    ],
    ids=["a call's begin", "never ended", "a peer that has gone"],
)
def test_mistakes_about_calls_that_go_on_are_caught(monkeypatch, old, new) -> None:
    assert_caught(monkeypatch, places, old, new, check_a_long_call)


def test_who_is_let_in_during_a_look_is_known_at_the_next(monkeypatch) -> None:
    looked = Places(Clock())
    connections = Places._connections

    def let_in_meanwhile(self: Places, ports: dict[int, int]) -> object:
        found = connections(self, ports)
        self.let_in("ipv4:10.0.0.1:5")
        return found

    monkeypatch.setattr(Places, "_connections", let_in_meanwhile)
    looked.look({1: 4})
    assert "ipv4:10.0.0.1:5" in looked._let_in


@pytest.mark.parametrize("num_strangers", [200])
async def test_idle_strangers_shut_nobody_out(start, monkeypatch, num_strangers: int) -> None:
    """More of them than there are places; whoever was let in stays, and new callers and probes come in."""
    monkeypatch.setattr(places, "EVERY_S", 0.01)
    config = ServerConfig(max_connections=64, lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start(config=config) as run:
        await run.client.info()
        idle = [one for _ in range(num_strangers) if (one := await connect(run.address, GREETING))]
        ends = [asyncio.ensure_future(one.is_closed_by_server(PATIENCE_S)) for one in idle]
        for end in itertools.islice(asyncio.as_completed(ends), len(ends) - places.LEAST_OF_HOST):
            assert await end
        await run.client.info()
        async with grpc.aio.insecure_channel(run.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        count = run.server.metrics.registry.get_sample_value
        assert count("outrider_connections_evicted_total") >= 1
        for end, one in zip(ends, idle, strict=True):
            end.cancel()
            one.close()
        await asyncio.gather(*ends, return_exceptions=True)
