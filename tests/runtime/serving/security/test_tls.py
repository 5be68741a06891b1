"""TLS and client certificates over real handshakes, and certificates that change under load."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider import CallError, Client
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.options import SecurityOptions

from tests.runtime.serving.security.credentials import Authority, bearer, write, write_keys

AUTHORITY = Authority()
TENANTS = """
[tenants.acme]
certificates = ["spiffe://acme/web"]
[tenants.other]
certificates = ["other.example"]
scopes = ["info"]
"""


def server_files(folder: Path, **more: Any) -> SecurityOptions:
    chain, key = AUTHORITY.certificate("localhost")
    return SecurityOptions(
        tls_certificate=write(folder / "chain.pem", chain, 0o644),
        tls_key=write(folder / "key.pem", key),
        **more,
    )


def mutual(folder: Path, **more: Any) -> SecurityOptions:
    return server_files(
        folder,
        tls_client_ca=write(folder / "ca.pem", "# Prüfstelle\n".encode() + AUTHORITY.pem, 0o644),
        tenants=write(folder / "tenants.toml", TENANTS),
        **more,
    )


def trust(*names: str, authority: Authority = AUTHORITY) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts the authority, with a certificate for names."""
    if not names:
        return grpc.ssl_channel_credentials(AUTHORITY.pem)
    chain, key = authority.certificate(*names)
    return grpc.ssl_channel_credentials(AUTHORITY.pem, key, chain)


@asynccontextmanager
async def dial(port: str, *names: str, **more: Any):
    async with Client(
        f"localhost:{port}",
        credentials=trust(*names, **more),
        options=(("grpc.enable_retries", 0),),
    ) as client:
        yield client


async def served_certificate(port: str) -> bytes:
    """The certificate of a new handshake, DER."""
    context = ssl.create_default_context(cadata=AUTHORITY.pem.decode())
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return certificate


async def test_plain_text_is_not_answered_where_there_is_tls(start, tmp_path: Path):
    security = Security(server_files(tmp_path))
    async with start(security=security) as run:
        port = run.address.rpartition(":")[2]
        with pytest.raises(CallError) as refusal:
            await run.client.info(timeout_s=20)
        assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
        async with dial(port) as client:
            assert (await client.info()).model == "letters"


async def test_a_certificate_is_swapped_under_load_without_a_failed_call(start, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", x="generate,info")
    options = server_files(tmp_path, keys=tmp_path / "keys")
    failed: list[str] = []
    security = Security(options, failed.append)
    ended, has_ended = asyncio.Queue[int](), asyncio.Event()

    async def load(port: str, client: Client, kind: int) -> None:
        while not has_ended.is_set():
            if kind == 0:
                async with dial(port) as client:
                    await client.info(metadata=bearer(keys["x"]))
            else:
                answer = client.generate("a", max_tokens=4, metadata=bearer(keys["x"]))
                assert len([chunk async for chunk in answer])
            ended.put_nowait(kind)

    async with start(security=security) as run:
        port = run.address.rpartition(":")[2]
        async with dial(port) as standing, asyncio.TaskGroup() as group:
            for kind in (0, 0, 1, 1):
                group.create_task(load(port, standing, kind))
            seen = {await served_certificate(port)}
            for _ in range(5):
                server_files(tmp_path)
                await asyncio.to_thread(security.look)
                seen.add(await served_certificate(port))
                # Calls of both kinds, on old connections and new ones, have gone on since.
                awaited = {0, 1}
                while awaited:
                    awaited.discard(await ended.get())
            has_ended.set()
        # A task of the group that had failed would have raised here.
        assert len(seen) == 6 and failed == []
        (tmp_path / "key.pem").write_bytes(AUTHORITY.certificate("localhost")[1])
        await asyncio.to_thread(security.look)
        assert failed == ["tls"]
        assert await served_certificate(port) in seen


async def test_files_are_watched_while_the_server_runs(start, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", x="info")
    options = SecurityOptions(keys=tmp_path / "keys", reload_every_s=0.01)
    failed = asyncio.Queue[str]()
    loop = asyncio.get_running_loop()
    security = Security(options, lambda name: loop.call_soon_threadsafe(failed.put_nowait, name))
    async with start(security=security) as run:
        await run.client.info(metadata=bearer(keys["x"]))
        write(tmp_path / "keys", "broken")
        assert await asyncio.wait_for(failed.get(), 20) == "keys"
        await run.client.info(metadata=bearer(keys["x"]))
        fresh = write_keys(tmp_path / "keys", x="info")
        async with asyncio.timeout(20):
            while True:
                try:
                    await run.client.info(metadata=bearer(fresh["x"]))
                    break
                except CallError as refusal:
                    assert refusal.code is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(CallError):
            await run.client.info(metadata=bearer(keys["x"]))


async def test_a_client_is_who_its_certificate_says(start, tmp_path: Path):
    async with start(security=Security(mutual(tmp_path))) as run:
        port = run.address.rpartition(":")[2]
        async with dial(port, "spiffe://acme/web") as client:
            answer = client.generate("a", max_tokens=3, temperature=0.0)
            assert "".join([chunk.text async for chunk in answer]) == "bcd"
            with pytest.raises(CallError) as refusal:
                await client.info(metadata={"outrider-tenant": "other"})
            assert refusal.value.code is grpc.StatusCode.PERMISSION_DENIED
        async with dial(port, "x.example", "other.example") as client:
            assert (await client.info(metadata={"outrider-tenant": "other"})).model == "letters"
            with pytest.raises(CallError) as refusal:
                await client.abort("x")
            assert refusal.value.code is grpc.StatusCode.PERMISSION_DENIED
        for names in (("unknown.example",), ("spiffe://acme/web", "other.example")):
            async with dial(port, *names) as client:
                with pytest.raises(CallError) as refusal:
                    await client.info()
                assert refusal.value.code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_without_a_certificate_of_ours_does_not_connect(start, tmp_path: Path):
    async with start(security=Security(mutual(tmp_path))) as run:
        port = run.address.rpartition(":")[2]
        for names, authority in (((), AUTHORITY), (("spiffe://acme/web",), Authority())):
            async with dial(port, *names, authority=authority) as client:
                with pytest.raises(CallError) as refusal:
                    await client.info(timeout_s=20)
                assert refusal.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_header_is_believed_before_a_certificate(start, tmp_path: Path):
    keys = write_keys(tmp_path / "keys", scraper="metrics")
    security = Security(mutual(tmp_path, keys=tmp_path / "keys"))
    codes = {"wrong": "UNAUTHENTICATED", keys["scraper"]: "PERMISSION_DENIED"}
    async with start(security=security) as run:
        port = run.address.rpartition(":")[2]
        async with dial(port, "spiffe://acme/web") as client:
            assert (await client.info()).model == "letters"
            for secret, code in codes.items():
                with pytest.raises(CallError) as refusal:
                    await client.info(metadata=bearer(secret))
                assert refusal.value.code.name == code


def test_files_that_cannot_be_used_refuse_the_start(tmp_path: Path):
    options = server_files(tmp_path)
    write(tmp_path / "key.pem", AUTHORITY.certificate("localhost")[1])
    with pytest.raises(ConfigError, match="tls_key: must be the key of the certificate"):
        Security(options)
