"""Many streams at once through a real server: one ending each, the tokens of plain decoding, no slot kept."""

import random
from collections import Counter
from dataclasses import replace

import grpc
import numpy as np
import pytest
from outrider.client import build_request
from outrider.errors import DeadlineExceeded
from outrider.runtime.core.config import ServerConfig
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.run import (
    broken_answer,
    check_equal,
    check_idle,
    check_memory,
    unequal_answer,
)
from scripts.lab.soak.traffic import Fate, Job, Outcome, Palette, draw_job, drive

NUM_STREAMS = 64
NUM_REQUESTS = 150
VOCAB = 29
MAX_GAMMA = 4
LETTERS = Palette(
    prompts=("abc", "the cat", "zzz", "a b a b a b", "é"),
    stops=("e", "no", " "),
    max_gamma=MAX_GAMMA,
    max_tokens=12,
    longest_deadline_s=0.2,
)
NOISE = np.random.default_rng(7).normal(0.0, 1.0, (VOCAB, VOCAB)).astype(np.float32)


def target_logits(prefix):
    """The successor about as often as not; the draft of the fixture proposes nothing else."""
    logits = NOISE[prefix[-1]].copy()
    logits[(prefix[-1] + 1) % 26] = 3.0
    return logits


def token(number: int) -> wire.Token:
    return wire.Token(id=number)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    rng = random.Random(3)
    return [draw_job(number, LETTERS, rng) for number in range(NUM_REQUESTS)]


async def test_every_stream_ends_once_with_the_tokens_of_plain_decoding(start, jobs):
    config = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0, max_queued=NUM_STREAMS)
    async with start(config=config, max_batch=16, target=target_logits) as run:
        outcomes = await drive(run.client, jobs, NUM_STREAMS)
        assert await check_idle(run.client) == []
        num_compared, problems = await check_equal(run.client, outcomes, NUM_STREAMS)
        assert await check_idle(run.client) == []
    assert problems == []
    assert [problem for one in outcomes if (problem := broken_answer(one))] == []
    names = Counter(one.job.request.request_id for one in outcomes)
    assert names == {job.request.request_id: 1 for job in jobs}
    assert num_compared > 300
    assert any(one.was_left for one in outcomes)
    reports = [one.finishes[0].speculation for one in outcomes if one.finishes]
    assert sum(report.num_accepted for report in reports) > 50
    assert sum(report.num_drafted - report.num_accepted for report in reports) > 50


def test_the_traffic_has_a_bit_of_everything(jobs):
    requests = [job.request for job in jobs]
    assert {job.fate for job in jobs} == set(Fate)
    drafters = {request.speculation.drafter for request in requests if not request.num_beams}
    assert drafters == {"model", "lookup", "none"}
    assert {2, 3, 4} <= {request.num_beams for request in requests}
    assert {request.speculation.gamma for request in requests} == set(range(MAX_GAMMA + 1))
    assert len({request.speculation.mode for request in requests}) == 3
    assert any(request.stop for request in requests)
    assert any(request.HasField("logprobs") for request in requests)
    assert any(request.sampling.top_k for request in requests)
    assert sum(job.is_determined for job in jobs) > NUM_REQUESTS / 3


def test_only_requests_whose_tokens_are_determined_are_compared():
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0}
    lenient, stable = wire.EXACTNESS_MODE_LENIENT, wire.EXACTNESS_MODE_SEED_STABLE

    def is_determined(options, **speculation) -> bool:
        return Job(request=build_request("a", **options, speculation=speculation)).is_determined

    assert is_determined(greedy)
    assert is_determined(drawn, mode=stable)
    assert not is_determined(drawn)
    assert not is_determined({}), "the default temperature is 1"
    assert not is_determined(greedy, mode=lenient, lenience=0.5)


def test_the_checks_find_what_they_are_for():
    job = Job(request=build_request("a", request_id="a", max_tokens=4, temperature=0.0))
    usage = wire.Finish(usage=wire.Usage(output_tokens=2))
    good = Outcome(job, [token(1), token(2)], "ab", [usage])
    assert broken_answer(good) is None and unequal_answer(good, good) is None
    assert "0 finishes" in broken_answer(Outcome(job, [token(1)]))
    assert "2 finishes" in broken_answer(Outcome(job, good.tokens, "ab", [usage, usage]))
    assert "2 counted" in broken_answer(Outcome(job, [token(1)], "a", [usage]))
    late = DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "noticed by the client")
    late_job = replace(job, fate=Fate.EXPIRE, deadline_s=0.1)
    assert broken_answer(replace(good, job=late_job, error=late)) is None
    assert broken_answer(Outcome(late_job, error=late)) is None
    assert "1 finishes" in broken_answer(replace(good, error=late))
    late.reason = "DEADLINE_EXCEEDED"
    assert "1 finishes" in broken_answer(replace(good, job=late_job, error=late))
    assert "tokens" in unequal_answer(Outcome(job, [token(3)], "c"), good)
    assert "text" in unequal_answer(Outcome(job, [token(1)], "a", [usage]), good)
    assert unequal_answer(Outcome(job, [token(1)], "a"), good) is None, "a prefix, cut short"
    assert check_memory([50.0, *range(100, 200)], 1, 20.0)[2] != []
    assert check_memory([50.0, *[100.0] * 100], 1, 20.0)[2] == []
