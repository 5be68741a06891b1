"""Requests that are left at any moment give their slots back."""

import random

from outrider.runtime.core.config import ServerConfig

from scripts.soak.cancels import cancel_all
from scripts.soak.traffic import Palette, draw_job

NUM_CANCELS = 300


async def test_no_slot_stays_behind(start):
    rng = random.Random(2)
    palette = Palette(prompts=("abc", "the cat"), stops=("e", "no"), max_gamma=4, max_tokens=200)
    jobs = (draw_job(number, palette, rng) for number in range(NUM_CANCELS))
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0)
    async with start(config=config, max_batch=8) as run:
        figures, problems = await cancel_all(run.address, jobs, rng, num_streams=32)
        admitted = run.server.metrics.registry.get_sample_value("outrider_requests_admitted_total")
    assert problems == []
    assert figures["sent"] == NUM_CANCELS
    assert figures["ended first"] < NUM_CANCELS / 2
    # Most were left while they ran.
    assert admitted > NUM_CANCELS / 2
