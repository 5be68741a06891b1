"""Whatever the engine did for somebody is charged to him: the audit log's sums are the engine's counts."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from outrider import CallError, Client
from outrider.runtime.core import request
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving import request_handler, response_stream
from outrider.runtime.serving.security.audit import AuditLog

from tests.mutants import put_in
from tests.runtime.conftest import Start, running
from tests.runtime.serving.security.test_quotas import client_of, security
from tests.runtime.serving.test_beam_search import likes_neighbours

TENANTS = ("x", "y", "z")
QUEUED = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0, max_queued=400)


def kinds(rng: random.Random) -> dict[str, Any]:
    """Options of a request: a plain one, one with several completions, a beam search, or one that scores its prompt."""
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "ignore_eos": True}
    match rng.randrange(4):
        case 0:
            options |= {"n": rng.randint(2, 4), "temperature": 1.0}
        case 1:
            num_beams = rng.randint(1, 4)
            n = rng.randint(1, num_beams)
            options |= {"num_beams": num_beams, "n": n, "max_tokens": rng.randint(50, 200)}
        case 2:
            options |= {"prompt_logprobs": 1, "temperature": 0.0}
        case _:
            options |= {"temperature": 0.0, "speculation": {"gamma": rng.randint(0, 4)}}
    return options


async def ask(client: Client, rng: random.Random, name: str) -> str:
    """Ask for something, and go away behind a chosen number of messages, or once another request was answered."""
    options, num_read = kinds(rng), rng.choice((0, 1, 2, 1000, 1000))
    stream = client.generate("a" * rng.randint(1, 40), request_id=name, **options)
    try:
        if num_read == 0:
            first = asyncio.ensure_future(anext(stream))
            for _ in range(rng.randint(1, 60)):
                await client.info()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return "left"
        async for _ in stream:
            num_read -= 1
            if not num_read:
                return "left"
            if rng.random() < 0.05:
                await client.abort(name)
    except CallError as error:
        return error.reason
    finally:
        await stream.aclose()
    return "answered"


async def an_hour(start: Start, folder: Path, seed: int, num_requests: int = 60) -> Counter[str]:
    """Serve many requests of some tenants with failures in between, and compare the books."""
    rng, path = random.Random(seed), folder / f"audit {seed}"
    shares = security(folder, "".join(f"[tenants.{one}]\n" for one in TENANTS))
    failing = sorted(rng.sample(range(400), 12))
    async with start(
        security=shares,
        audit=AuditLog(path),
        config=QUEUED,
        target=likes_neighbours,
        failing_extends=failing,
    ) as run:
        clients = [client_of(run.address, one) for one in TENANTS]
        tasks = [
            ask(rng.choice(clients), random.Random(rng.random()), f"r{index}")
            for index in range(num_requests)
        ]
        outcomes = Counter(await asyncio.gather(*tasks))
        for client in clients:
            await client.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    admitted = [line for line in lines if line["outcome"] == "admitted"]
    snapshot = run.serving.worker.snapshot()
    assert sum(line["output_tokens"] for line in admitted) == snapshot.num_emitted > 0
    # Who leaves at once may never have called.
    assert num_requests - outcomes["left"] <= len(lines) <= num_requests
    count = run.server.metrics.registry.get_sample_value
    for tenant in TENANTS:
        used = [
            one["prompt_tokens"] + one["output_tokens"] for one in lines if one["tenant"] == tenant
        ]
        charged = count("outrider_tenant_tokens_total", {"tenant": tenant}) or 0.0
        assert charged == sum(used)
    return outcomes


@pytest.mark.parametrize("seed", range(4))
async def test_the_audits_sums_are_the_engines_counts(start, tmp_path: Path, seed: int) -> None:
    outcomes = await an_hour(start, tmp_path, seed)
    assert outcomes["answered"] > 5 and outcomes["left"] > 5, outcomes


async def test_a_search_that_is_cancelled_is_charged_for_its_passes(start, tmp_path) -> None:
    await check_cancelled_search(start, tmp_path)


async def check_cancelled_search(start: Start, folder: Path) -> None:
    loop, is_searching = asyncio.get_running_loop(), asyncio.Event()

    def telling(prefix):
        if len(prefix) == 9:
            loop.call_soon_threadsafe(is_searching.set)
        return likes_neighbours(prefix)

    path = folder / "audit"
    async with start(target=telling, audit=AuditLog(path)) as run:
        options = {"num_beams": 4, "n": 2, "max_tokens": 4000, "ignore_eos": True}
        search = asyncio.create_task(anext(run.client.generate("a", request_id="s", **options)))
        await is_searching.wait()
        assert await run.client.abort("s") == ["s"]
        with pytest.raises(CallError):
            await search
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert line["reason"] == "ABORTED_BY_RPC"
    assert line["output_tokens"] == run.serving.worker.snapshot().num_emitted
    # A pass for each token behind the prompt's one, and two answers.
    assert line["output_tokens"] >= 2 * 8 and line["output_tokens"] % 2 == 0


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (request, "return self.stats.num_steps * beams.num_results", "return 0"),
        (response_stream, "self.num_tokens = max(self.num_tokens, event.num_output)", "pass"),
        (
            request_handler,
            "live.stream.when_over(lambda: self._close(live, record, code, reason))",
            "self._close(live, record, code, reason)",
        ),
    ],
    ids=["searches are free", "no count at the end", "the last step is free"],
)
async def test_a_mistake_is_caught(tmp_path: Path, monkeypatch, module, old, new) -> None:
    put_in(monkeypatch, module, old, new)
    with pytest.raises(AssertionError):
        await check_cancelled_search(running, tmp_path)
        for seed in range(4):
            await an_hour(running, tmp_path, seed)
