"""Growth is told from the median at the warm-up to the median at the end."""

import os

import pytest
from outrider.runtime.core.config import ServerConfig

from scripts.lab.soak.memory import drive_all, growth
from scripts.lab.soak.traffic import Job, build_request


def test_growth_is_between_two_medians():
    assert growth([*[50.0] * 10, *[100.0] * 10, *[100.0] * 20], 20, window=10) == 0.0
    assert growth([*[50.0] * 10, *[100.0] * 10, *[103.0] * 20], 20, window=10) == pytest.approx(
        0.03
    )
    assert growth([*[100.0] * 30, 900.0, *[100.0] * 9], 20, window=10) == 0.0


async def test_memory_is_sampled_once_per_request(start):
    jobs = [Job(request=build_request("abc", request_id=f"{n}", max_tokens=2)) for n in range(20)]
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start(config=config) as run:
        samples = await drive_all(run.address, os.getpid(), jobs, num_streams=4)
    assert len(samples) == len(jobs)
    assert min(samples) > 10.0
