"""The application on a real Ray cluster of two nodes, asked through its proxies."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from outrider import CallError, Client, DeadlineExceeded, RequestRefused, affinity_metadata
from outrider.v1 import inference_pb2 as wire

from tests.conftest import write_llama
from tests.runtime.addons.ray.ray_cluster import Cluster, environment, running_cluster

pytestmark = pytest.mark.long

PATIENCE_S = 120.0
NUM_SLOTS = 4
ARGS = {"max_running": NUM_SLOTS, "num_threads": 1, "default_gamma": 2, "num_cpus": 1, "min_replicas": 2,
        "max_replicas": 2, "drain_timeout_s": 20.0, "trusts_tenants": True,
        "prefix_cache_bytes": 1 << 24}  # fmt: skip
PROMPT = [*range(10, 74)]
LONG = 400


@pytest.fixture(scope="module")
def bundle(tiny_checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many layers, so that its answers last."""
    from outrider.export.pipeline import ExportOptions, export_bundle

    root = tmp_path_factory.mktemp("slow")
    write_llama(root / "target", num_layers=12, hidden_size=64, seed=3)
    out = root / "bundle"
    export_bundle(
        target=root / "target",
        draft=tiny_checkpoints[1],
        out=out,
        options=ExportOptions(max_context=512, max_batch=NUM_SLOTS),
        progress=lambda stage: None,
    )
    return out


@pytest.fixture(scope="module")
def cluster(bundle: Path) -> Iterator[Cluster]:
    try:
        environment()
    except subprocess.CalledProcessError:
        pytest.skip("no .venv-ray, and ray[serve] cannot be installed")
    with running_cluster(2) as cluster:
        cluster.deploy(bundle=str(bundle), **ARGS)
        yield cluster


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[Client]:
    """A client with a connection of its own, to whichever proxy the kernel gives it."""
    options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
    async with Client(cluster.target, options=options, tenant="tests") as client:
        yield client


async def ended(stream: AsyncGenerator[wire.GenerateResponse]) -> str:
    """Return how an answer ended: "finished", or code and reason."""
    finishes = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for response in stream:
                finishes += response.HasField("finish")
    except CallError as error:
        return f"{error.code.name} {error.reason}".strip()
    except TimeoutError:
        return "silent"
    return "finished" if finishes == 1 else f"{finishes} finishes"


def long_answer(
    client: Client,
    timeout_s: float = PATIENCE_S,
    metadata: dict[str, str] | None = None,
    request_id: str = "",
) -> AsyncGenerator[wire.GenerateResponse]:
    """An answer of some hundred passes of the target."""
    return client.generate(
        PROMPT,
        max_tokens=LONG,
        ignore_eos=True,
        speculation={"enabled": False},
        timeout_s=timeout_s,
        metadata=metadata,
        request_id=request_id,
    )


async def load_of(client: Client, session: str) -> wire.Load:
    return (await client.info(metadata=affinity_metadata(session=session))).load


async def test_all_methods_answer_and_refusals_carry_their_reasons(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        output = await client.complete(PROMPT, max_tokens=12, ignore_eos=True, temperature=0.0)
        assert len(output.outputs[0].token_ids) == 12
        several = await client.complete(PROMPT, max_tokens=3, ignore_eos=True, n=2)
        assert [len(one.token_ids) for one in several.outputs] == [3, 3]
        assert (await client.info()).load.num_slots == NUM_SLOTS
        assert await client.tokenize("a house") and await client.abort("nobody") == []
        with pytest.raises(RequestRefused) as refused:
            await client.complete(PROMPT, temperature=-1.0)
        error = refused.value
        assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert [one.field for one in error.violations] == ["sampling.temperature"]
        with pytest.raises(RequestRefused) as refused:
            await client.tokenize("a", target=True)
        assert refused.value.reason == "UNSUPPORTED_OPTION"


async def test_a_deadline_and_a_cancellation_free_the_slot(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        session = affinity_metadata(session="leaves")
        with pytest.raises(DeadlineExceeded):
            async for _ in long_answer(client, 0.1, session):
                pass
        stream = long_answer(client, metadata=session)
        await anext(stream), await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while (await load_of(client, "leaves")).num_free_slots != NUM_SLOTS:
                pass


async def test_a_running_request_is_aborted_by_its_id_and_session(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        session = affinity_metadata(session="aborts")
        stream = long_answer(client, metadata=session, request_id="mine")
        await anext(stream), await anext(stream)
        assert await client.abort("mine", "nobody", metadata=session) == ["mine"]
        assert await ended(stream) == "CANCELLED ABORTED_BY_RPC"


async def test_a_session_stays_with_its_replica_and_so_does_a_prefix(cluster: Cluster) -> None:
    async def cached(client: Client, metadata: dict[str, str], prompt: list[int]) -> int:
        output = await client.complete(prompt, max_tokens=1, metadata=metadata)
        return output.usage.cached_tokens

    async with client_of(cluster) as one, client_of(cluster) as other:
        firsts = 0
        for number in range(12):
            metadata = affinity_metadata(session=f"session-{number}")
            found = [
                await cached(client, metadata, [*range(100, 164)])
                for client in (one, other, one, other)
            ]
            firsts += found[0] == 0
            assert min(found[1:]) > 0
        assert firsts == 2, "one per replica: sessions are spread, and each stays"
        prompt = [*range(200, 264)]
        metadata = affinity_metadata(prefix=prompt)
        found = [await cached(client, metadata, prompt) for client in (one, other, one, other)]
        assert found[0] == 0 < min(found[1:])


ROUTE = """
import asyncio
from types import SimpleNamespace as Some
from outrider.runtime.addons.ray.router import AffinityRouter

router = object.__new__(AffinityRouter)
replicas = [Some(replica_id=Some(unique_id=name)) for name in "abc"]

def chosen(pending):
    groups = asyncio.run(router.choose_replicas(replicas, pending))
    return ["".join(one.replica_id.unique_id for one in group) for group in groups]

keyed = Some(metadata=Some(session_id="s", grpc_context=None))
assert sorted(chosen(keyed)) == ["a", "b", "c"] and chosen(keyed) == chosen(keyed)
assert chosen(None) == chosen(Some(metadata=Some(session_id="", grpc_context=None))) == ["abc"]
assert chosen(Some(metadata=None)) == chosen(object()) == ["abc"]
"""


def test_a_router_that_fails_sends_requests_to_any_replica(cluster: Cluster) -> None:
    """What it raised would be logged, and the call would hang."""
    cluster.run("-c", ROUTE)


async def test_running_answers_outlive_a_change_of_all_replicas(
    cluster: Cluster, bundle: Path
) -> None:
    async with client_of(cluster) as client:
        is_over, ends = asyncio.Event(), Counter[str]()

        async def one_stream() -> None:
            while not is_over.is_set():
                ends[await ended(long_answer(client))] += 1

        async def change() -> None:
            args = ARGS | {"queue_timeout_s": 29.0}
            await asyncio.to_thread(cluster.deploy, bundle=str(bundle), **args)
            is_over.set()

        await asyncio.gather(change(), *(one_stream() for _ in range(4)))
    assert ends.keys() == {"finished"} and ends["finished"] > 8


async def test_only_the_answers_of_a_killed_replica_end_and_say_so(cluster: Cluster) -> None:
    ends = await ends_around(cluster, lambda: cluster.kill_replica(1))
    assert set(ends) == {"finished", "UNAVAILABLE REPLICA_LOST"}
    assert ends["UNAVAILABLE REPLICA_LOST"] <= NUM_SLOTS


async def test_only_the_answers_of_a_killed_node_end_and_say_so(cluster: Cluster) -> None:
    """Those that its replica made, and those that its proxy passed on: of these the connection is gone."""
    ends = await ends_around(cluster, lambda: cluster.kill_node(1))
    assert set(ends) - {"UNAVAILABLE"} <= {"finished", "UNAVAILABLE REPLICA_LOST"}
    assert ends["finished"] > 8
    assert ends.total() > ends["finished"]


async def ends_around(cluster: Cluster, kill: Any) -> Counter[str]:
    """Return how answers under load ended, some of which ran when something was killed."""
    is_over, ends = asyncio.Event(), Counter[str]()
    ended_once: asyncio.Queue[None] = asyncio.Queue()

    async def one_stream() -> None:
        async with client_of(cluster) as client:
            while not is_over.is_set():
                ends[await ended(long_answer(client))] += 1
                ended_once.put_nowait(None)

    async def killer() -> None:
        for _ in range(8):
            await ended_once.get()
        await asyncio.to_thread(kill)
        for _ in range(16):
            await ended_once.get()
        is_over.set()

    await asyncio.gather(killer(), *(one_stream() for _ in range(8)))
    return ends
