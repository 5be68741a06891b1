"""Tenants: a name in the call's metadata keeps ids and what drafters learn apart."""

from __future__ import annotations

import socket

import grpc
import psutil
import pytest
from outrider import CallError, Client
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.tenant import TENANT_KEY, is_local, tenant_of

X = {"tenant": "x", "options": (("grpc.enable_retries", 0),)}
PHRASES = {"drafter": "phrases", "gamma": 4, "phrase_length": 3}


@pytest.mark.parametrize(
    ("metadata", "name"),
    [((), ""), (((TENANT_KEY, "a.b:c-1"),), "a.b:c-1"), ((("user-agent", "x"),), "")],
)
def test_the_tenant_is_the_one_named(metadata, name) -> None:
    assert tenant_of(metadata) == name


@pytest.mark.parametrize(
    "values", [("",), ("a" * 129,), ("with space",), (b"bytes",), ("one", "two")]
)
def test_an_impossible_tenant_is_refused_by_name(values) -> None:
    with pytest.raises(RequestError, match="outrider-tenant"):
        tenant_of([(TENANT_KEY, value) for value in values])


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.9.9.9:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5000", True),
        ("unix:", True),
        ("unix:/run/outrider.sock", True),
        ("ipv4:10.0.0.7:5000", False),
        ("ipv6:%5Bfd00::2%5D:5000", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:5000", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", False),
        ("", False),
        ("vsock:1:2", False),
    ],
)
def test_a_caller_on_this_machine_is_told_from_others(peer, expected) -> None:
    assert is_local(peer) is expected


def address_elsewhere() -> str:
    """An address of this machine that is not the loopback's; calls to it come from it."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no IPv4 address but the loopback's")


async def test_callers_from_elsewhere_without_a_tenant_share_nothing(start) -> None:
    async with start(host=address_elsewhere()) as running:
        first = await steps_of(running.client)
        assert await steps_of(running.client) == first


async def test_a_tenant_named_from_elsewhere_is_not_believed(start) -> None:
    async with start(host=address_elsewhere()) as running:
        async with Client(running.address, tenant="x") as named:
            with pytest.raises(CallError, match="leave it out") as refusal:
                await steps_of(named)
        assert refusal.value.code is grpc.StatusCode.PERMISSION_DENIED
        assert refusal.value.reason == "PERMISSION_DENIED"


async def test_local_callers_without_a_tenant_share(start) -> None:
    async with start() as running:
        first = await steps_of(running.client)
        assert await steps_of(running.client) < first


async def steps_of(client: Client) -> int:
    async for chunk in client.generate("abc", max_tokens=26, temperature=0.0, speculation=PHRASES):
        finish = chunk.finish
    return finish.speculation.num_steps


async def test_phrases_are_reused_within_a_tenant_and_by_no_other(start) -> None:
    async with start() as running, Client(running.address, tenant="x") as x:
        first = await steps_of(x)
        assert await steps_of(x) < first
        async with Client(running.address, tenant="y") as y:
            assert await steps_of(y) == first
        assert await steps_of(running.client) == first


async def test_pools_of_tenants_are_bounded_in_number(start) -> None:
    config = ServerConfig(
        lb_delay_s=0.0, drain_timeout_s=0.0, drafting=DraftingConfig(max_scopes=2)
    )
    async with start(config=config) as running:
        for name in ("a", "b", "c"):
            async with Client(running.address, tenant=name) as client:
                await steps_of(client)
        drafters = running.serving.worker._parts.drafters
        assert len(drafters["phrases"]._pools) == 2


async def test_ids_are_a_tenants_own(start_endless) -> None:
    async with start_endless() as run, Client(run.address, **X) as other:
        mine = run.endless(request_id="same")
        await anext(mine)
        # Another tenant may use the same id, and cannot end what is not its own.
        assert await other.abort("same") == []
        theirs = other.generate("a", max_tokens=3, temperature=0.0, request_id="same")
        assert "".join([chunk.text async for chunk in theirs]) == "bcd"
        assert await run.client.abort("same") == ["same"]
        with pytest.raises(CallError):
            async for _ in mine:
                pass


async def test_an_impossible_tenant_is_refused_over_the_wire(start) -> None:
    async with start() as running, Client(running.address, tenant="no spaces please") as client:
        with pytest.raises(CallError) as refusal:
            await steps_of(client)
        assert refusal.value.reason == "INVALID_PARAMETER"
        with pytest.raises(CallError):
            await client.abort("x")
