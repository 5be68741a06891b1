"""What a server counts of its requests, and that names and types are as Prometheus wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from outrider import CallError
from outrider.runtime.core.events import EmittedToken, Finished, FinishReason, Provenance, Times
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.stats import SpeculationStats
from outrider.runtime.serving.observability.histogram import Histogram
from outrider.runtime.serving.observability.metrics import Metrics, StreamCounts
from outrider.runtime.serving.observability.process import LAG_EVERY_S, LoopLag
from outrider.runtime.serving.response_stream import Batch
from prometheus_client import CollectorRegistry

from tests.runtime.markov import Clock, spec

LE = "+Inf"


class Reader:
    """Samples of a registry, by the end of their names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"outrider_{name}", labels)

    def histogram(self, name: str) -> tuple[float | None, float | None]:
        """Observations and their sum."""
        return self(f"{name}_count"), self(f"{name}_sum")


def batch(num_tokens: int, end: Finished | None = None, index: int = 0) -> Batch:
    token = EmittedToken(token=1, provenance=Provenance.BONUS)
    return Batch(tokens=(token,) * num_tokens, text="", steps=(), end=end, index=index)


def ended(times: Times | None = None) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH,
        stop=None,
        text="",
        num_prompt=1,
        num_output=1,
        report=SpeculationStats(max_gamma=0).report(
            drafter="none", mode=None, lenience=1.0, off_reason=None
        ),
        times=times,
    )


def test_a_weighted_observation_counts_as_often_as_it_says():
    histogram = Histogram("x", "text", (1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0, 2)
    (metric,) = histogram.collect()
    found = {one.labels.get("le", one.name): one.value for one in metric.samples}
    assert found == {"1.0": 1, "2.0": 4, "+Inf": 6, "x_count": 6, "x_sum": 1.0 + 4.5 + 18.0}


def test_the_time_between_two_responses_is_divided_over_their_tokens():
    clock, metrics = Clock(), Metrics()
    counts, read = StreamCounts(metrics, clock), Reader(metrics.registry)
    clock.now = 2.0
    counts.count(batch(1))
    clock.now = 2.75
    counts.count(batch(3))
    clock.now = 3.0
    counts.count(batch(1, ended()))
    assert read.histogram("time_to_first_token_seconds") == (1.0, 2.0)
    number, total = read.histogram("inter_token_latency_seconds")
    assert number == 4 and total == pytest.approx(1.0)
    assert read("inter_token_latency_seconds_bucket", le="0.3") == 4
    assert read.histogram("e2e_request_latency_seconds") == (1.0, 3.0)


def test_gaps_of_one_completion_are_not_anothers():
    clock, metrics = Clock(), Metrics()
    counts, read = StreamCounts(metrics, clock, 2), Reader(metrics.registry)
    for now, index in ((1.0, 0), (2.0, 1), (2.5, 1), (5.0, 0)):
        clock.now = now
        counts.count(batch(1, index=index))
    number, total = read.histogram("inter_token_latency_seconds")
    assert (number, total) == (2, 0.5 + 4.0)
    assert read("time_to_first_token_seconds_count") == 1


def test_parts_of_a_request_and_its_lengths_are_counted_once_it_is_answered():
    metrics = Metrics()
    read = Reader(metrics.registry)
    asked: RequestSpec = spec("a", (1, 2, 3), max_tokens=7, num_samples=2)
    times = Times(queued_s=1.0, prefill_s=2.0, decode_s=4.0)
    metrics.requests.count_queued(times)
    metrics.requests.count_answered(asked, times, 11)
    sums = {"queue": 1.0, "prefill": 2.0, "decode": 4.0, "inference": 6.0}
    for part, seconds in sums.items():
        assert read.histogram(f"request_{part}_time_seconds") == (1, seconds)
    lengths = {"prompt_tokens": 3, "generation_tokens": 11, "params_max_tokens": 7, "params_n": 2}
    for name, value in lengths.items():
        assert read.histogram(f"request_{name}") == (1, value)


async def test_a_loop_that_is_kept_busy_lags():
    class Loop:
        """Time that moves on while somebody waits, and by 3 s more while another one is served."""

        now = 0.0

        def time(self) -> float:
            return self.now

    loop, lag = Loop(), LoopLag()

    async def sleep(seconds: float) -> None:
        loop.now += seconds + 3.0
        if loop.now > 10.0:
            raise asyncio.CancelledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        patch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await lag.watch()
    values: Mapping[str, float] = {
        one.name: one.value for metric in lag.collect() for one in metric.samples
    }
    for name in ("outrider_loop_lag_seconds", "outrider_event_loop_lag_seconds"):
        assert values[f"{name}_count"] == 3
        assert values[f"{name}_sum"] == 9.0
    assert LAG_EVERY_S < 3.0


async def test_a_served_request_is_in_every_histogram(start):
    async with start() as run:
        read = Reader(run.server.metrics.registry)
        async for _ in run.client.generate("abc", max_tokens=9, n=2, temperature=0.0):
            pass
        for name in (
            *(
                f"request_{part}_time_seconds"
                for part in ("queue", "prefill", "decode", "inference")
            ),
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
        ):
            assert read.histogram(name)[0] == 1, name
        parts = [
            read.histogram(f"request_{part}_time_seconds")[1] for part in ("prefill", "decode")
        ]
        whole = read.histogram("request_inference_time_seconds")[1]
        assert sum(parts) == pytest.approx(whole)
        assert read.histogram("request_prompt_tokens") == (1, 3)
        assert read.histogram("request_generation_tokens") == (1, 18)
        assert read.histogram("request_params_max_tokens") == (1, 9)
        assert read.histogram("request_params_n") == (1, 2)
        assert read("engine_steps_total") == read("engine_step_seconds_count") > 0
        assert read("slots") == read("slots_free") == 4
        assert read("kv_cache_capacity_tokens") == 4 * 4200
        assert read("engine_restarts_total") == 0
        assert read("engine_state", state="serving") == 1
        assert read("engine_state", state="draining") == 0


async def test_a_running_request_holds_tokens_and_one_that_ended_early_has_waited(start_endless):
    async with start_endless() as run:
        read = Reader(run.server.metrics.registry)
        stream = run.endless(request_id="mine")
        await anext(stream)
        assert read("kv_cache_tokens") > 0 and read("num_requests_running") == 1
        await run.client.abort("mine")
        with pytest.raises(CallError):
            async for _ in stream:
                pass
        assert read("request_queue_time_seconds_count") == 1
        assert read("request_decode_time_seconds_count") == 0
        assert read("time_to_first_token_seconds_count") == 1
        assert read("e2e_request_latency_seconds_count") == 0


async def test_the_state_follows_the_server(start):
    async with start() as run:
        read = Reader(run.server.metrics.registry)
        run.serving.worker.is_ready = False
        assert read("engine_state", state="restarting") == 1
        run.serving.worker.is_ready = True
        run.server.hurry()
        await run.server.drain()
        assert read("engine_state", state="draining") == 1
        run.server.has_failed.set()
        assert read("engine_state", state="failed") == 1
        assert sum(read("engine_state", state=one) for one in ("starting", "serving")) == 0
