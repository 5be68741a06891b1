"""Prefixes over the wire: who finds whose, what is told of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from outrider import CallError, Client
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import HistoryScope
from outrider.runtime.core.errors import ConfigError

from tests.runtime.conftest import ALPHABET, Start

TEXT = ALPHABET[:26]


def config(scope: HistoryScope = HistoryScope.TENANT) -> ServerConfig:
    return ServerConfig(
        lb_delay_s=0.0,
        drain_timeout_s=0.0,
        prefix_cache_bytes=1 << 20,
        prefix_cache_scope=scope,
    )


async def cached(client: Client, prompt: str = TEXT, **options: Any) -> int:
    chunks = client.generate(prompt, max_tokens=4, temperature=0.0, **options)
    usage = [chunk.finish.usage async for chunk in chunks][-1]
    assert usage.prompt_tokens == len(prompt)
    return int(usage.cached_tokens)


async def test_usage_and_metrics_tell_what_was_found(start: Start) -> None:
    async with start(config=config()) as run:
        info = await run.client.info()
        assert info.limits.prefix_cache_bytes == 1 << 20
        assert await cached(run.client) == 0
        # The answer but its last token is found too.
        assert await cached(run.client, TEXT + "abcd") == 29
        read = run.server.metrics.registry.get_sample_value
        assert read("outrider_prefix_cache_queries_total") == 26 + 30
        assert read("outrider_prefix_cache_hits_total") == 29
        assert read("outrider_prefix_cache_evictions_total") == 0
        assert read("outrider_prefix_cache_bytes") > 0


async def test_without_memory_for_it_nothing_is_found(start: Start) -> None:
    async with start() as run:
        assert [await cached(run.client, cache_salt="a") for _ in range(2)] == [0, 0]
        assert (await run.client.info()).limits.prefix_cache_bytes == 0
        read = run.server.metrics.registry.get_sample_value
        assert read("outrider_prefix_cache_queries_total") is None


async def test_tenants_and_salts_share_nothing(start: Start) -> None:
    async with start(config=config()) as run, Client(run.address, tenant="x") as x:
        assert await cached(run.client) == 0
        assert await cached(x) == 0
        for salt in ("one", "other/one"):
            assert await cached(run.client, cache_salt=salt) == 0
            assert await cached(run.client, cache_salt=salt) == 25
        assert await cached(x, cache_salt="one") == 0
        assert await cached(x) == 25


async def test_where_the_server_shares_tenants_do(start: Start) -> None:
    shared = config(HistoryScope.SERVER)
    async with start(config=shared) as run, Client(run.address, tenant="x") as x:
        assert await cached(run.client) == 0
        assert await cached(x) == 25
        assert await cached(x, cache_salt="mine") == 0


async def test_a_salt_that_is_too_long_is_refused_by_name(start: Start) -> None:
    async with start(config=config()) as run:
        assert await cached(run.client, cache_salt="é" * 128) == 0
        with pytest.raises(CallError, match="cache_salt: must be at most 128 characters"):
            await cached(run.client, cache_salt="a" * 129)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes"),
        ({"prefix_cache_bytes": 1 << 60}, "prefix_cache_bytes"),
        ({"prefix_cache_scope": HistoryScope.REQUEST}, "prefix_cache_scope"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ServerConfig(**settings)
