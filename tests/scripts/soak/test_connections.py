"""Waves of connections and header bombs are dropped, and the server serves on."""

import pytest
from outrider.runtime.core.config import ServerConfig

from scripts.soak.connections import WAVES, serves, wave


@pytest.mark.parametrize("name", WAVES)
async def test_a_server_serves_on_after_a_wave(start, name: str):
    config = ServerConfig(max_connections=16, lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start(config=config) as run:
        assert await wave(run.address, WAVES[name], 64, held_s=0.0) > 0
        assert await serves(run.address)
