"""A tenant far beyond its quota beside one within it, and callers whose deadlines cannot be met."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from outrider import Client, Hopeless
from outrider.errors import CallError

from scripts.bench.serving import (
    Answer,
    Arrival,
    Traffic,
    arrivals,
    percentile_ms,
    saturation,
    send,
)
from scripts.bench.tools.common import code_prompts
from scripts.bench.tools.results import Row, Scalar
from scripts.soak.server import running_server

QUOTA_SHARE, CALM_SHARE, EXCESS = 0.25, 0.25, 10.0
"""Of what a server completes, the greedy tenant's quota, and what the calm one asks; quotas that the first one asks."""
MOST_SHARE, MOST_SLOWER, MOST_REFUSAL_MS = 1.1, 1.3, 20.0
RELOAD_S = 0.2
_READY_S = 120.0
_NUM_WAITING = 16
# Refused requests are not to be sent again: the load would become the client's.
_ONCE = (("grpc.enable_retries", 0),)


def quotas(bundle: Path, folder: Path, seconds: float, max_tokens: int, max_running: int) -> Row:
    """Return what a tenant got of its quota that asked for ten, and another's times to first token beside it."""
    tenants = folder / "shares.toml"
    tenants.write_text("[tenants.greedy]\n", encoding="utf-8")
    options = ("--tenants", str(tenants), "--reload-every-s", str(RELOAD_S))
    with (
        running_server(bundle, *options, *_busy(max_running)) as server,
        # The flood is to cost the other tenant's client no time.
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
    ):
        process.submit(_flood, server.address, ()).result()
        return asyncio.run(_beside(server.address, process, tenants, seconds, max_tokens))


async def _beside(
    address: str, process: Executor, tenants: Path, seconds: float, max_tokens: int
) -> Row:
    prompts = code_prompts(16, num_lines=3)
    async with Client(address, tenant="calm", options=_ONCE) as calm:
        await calm.wait_ready(timeout_s=_READY_S)
        warm = arrivals(Traffic(prompts=prompts, num_requests=32, max_tokens=max_tokens), 1.0, 0)
        full_per_s = await saturation(calm, warm, "plain")
        quota_per_s = QUOTA_SHARE * full_per_s
        rule = f"[tenants.greedy]\nrequests_per_s = {quota_per_s}\nburst_requests = 1\n"
        await asyncio.to_thread(tenants.write_text, rule, encoding="utf-8")
        await asyncio.sleep(5 * RELOAD_S)
        modest = _stream(prompts, CALM_SHARE * full_per_s, seconds, max_tokens, seed=1)
        flood = _stream(prompts, EXCESS * quota_per_s, seconds, max_tokens, seed=2)
        alone = await send(calm, modest, "plain")
        flooding = process.submit(_flood, address, flood)
        beside = await send(calm, modest, "plain")
        num_taken = await asyncio.wrap_future(flooding)
    alone_ms, beside_ms = _ttft_p99_ms(alone), _ttft_p99_ms(beside)
    figures: dict[str, Scalar] = {
        "quota_per_s": quota_per_s,
        "asked": len(flood),
        "got": num_taken,
        "share_of_quota": num_taken / (quota_per_s * seconds + 1),
        "other_asked": len(modest),
        "other_completed": sum(one.is_whole for one in beside),
        "other_ttft_p99_alone_ms": alone_ms,
        "other_ttft_p99_beside_ms": beside_ms,
        "slower": beside_ms / alone_ms,
    }
    return Row(case={"figure": "ten times the quota"}, figures=figures)


def _flood(address: str, requests: Sequence[Arrival]) -> int:
    """Send the greedy tenant's requests, and return how many were answered."""

    async def flood() -> int:
        async with Client(address, tenant="greedy", options=_ONCE) as greedy:
            await greedy.wait_ready(timeout_s=_READY_S)
            return sum(one.is_whole for one in await send(greedy, requests, "plain"))

    return asyncio.run(flood())


def hopeless(bundle: Path, num_probes: int, max_tokens: int) -> Row:
    """Return how soon callers are refused whose deadlines pass before the only slot is given back.

    Deadlines are a quarter of the time that the slot is held: by that, and not by the queue, since earlier deadlines go
    first. Long answers (``max_tokens``) keep them well above the time of a call.
    """
    with running_server(bundle, *_busy(max_running=1)) as server:
        return asyncio.run(_refusals(server.address, num_probes, max_tokens))


async def _refusals(address: str, num_probes: int, max_tokens: int) -> Row:
    (prompt,) = code_prompts(1, num_lines=3)
    is_over = asyncio.Event()
    async with Client(address, options=_ONCE) as client:
        await client.wait_ready(timeout_s=_READY_S)

        async def load() -> None:
            while not is_over.is_set():
                await client.complete(prompt, max_tokens=max_tokens, ignore_eos=True)

        loads = [asyncio.create_task(load()) for _ in range(_NUM_WAITING)]
        while (await client.info()).load.num_queued < _NUM_WAITING - 1:  # noqa: ASYNC110  (of another process)
            await asyncio.sleep(RELOAD_S)
        # Behind all that wait: so the server measures what a slot takes, and so do we.
        began_s = time.perf_counter()
        await client.complete(prompt, max_tokens=1)
        deadline_s = (time.perf_counter() - began_s) / _NUM_WAITING / 4
        refused_s: list[float] = []
        others: Counter[str] = Counter()
        for _ in range(num_probes):
            began_s = time.perf_counter()
            try:
                await client.complete(prompt, max_tokens=1, timeout_s=deadline_s)
                others["answered"] += 1
            except Hopeless:
                refused_s.append(time.perf_counter() - began_s)
            except CallError as error:
                others[error.reason or error.code.name] += 1
        is_over.set()
        await asyncio.gather(*loads)
    figures: dict[str, Scalar] = {
        "deadline_ms": 1e3 * deadline_s,
        "refused": len(refused_s),
        "others": ", ".join(f"{count} {name}" for name, count in others.items()),
        "refused_p50_ms": percentile_ms(refused_s, 50),
        "refused_p99_ms": percentile_ms(refused_s, 99),
    }
    return Row(case={"figure": "hopeless deadlines"}, figures=figures)


def _busy(max_running: int) -> tuple[str, ...]:
    return (
        *("--gamma", "0", "--max-running", str(max_running), "--max-queued", "4096"),
        *("--queue-timeout-s", "600"),
    )


def _stream(
    prompts: Sequence[str], rate_per_s: float, seconds: float, max_tokens: int, seed: int
) -> list[Arrival]:
    """Return the arrivals of so many seconds."""
    count = math.ceil(2 * rate_per_s * seconds) + 8
    many = arrivals(
        Traffic(prompts=prompts, num_requests=count, max_tokens=max_tokens), rate_per_s, seed
    )
    return [one for one in many if one.at_s <= seconds]


def _ttft_p99_ms(answers: Sequence[Answer]) -> float:
    found = percentile_ms([one.ttft_s for one in answers if one.stamps], 99)
    return math.nan if found is None else found
