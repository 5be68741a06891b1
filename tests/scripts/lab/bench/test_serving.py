"""The serving benchmark's arithmetic, and its traffic through a real server."""

import itertools
import math

import pytest

from scripts.lab.bench.serving import (
    WAYS,
    Answer,
    Bounds,
    Traffic,
    arrivals,
    figures_of,
    jain,
    percentile_ms,
    sweep,
)

TRAFFIC = Traffic(prompts=("abc", "the cat"), num_requests=6, max_tokens=8)
WIDE = Bounds(ttft_s=math.inf, itl_s=math.inf)


def test_arrivals_are_the_same_for_a_seed_and_have_the_rate() -> None:
    many = Traffic(prompts=("a", "b"), num_requests=4000, max_tokens=9)
    stream = arrivals(many, 20.0, seed=1)
    assert stream == arrivals(many, 20.0, seed=1) != arrivals(many, 20.0, seed=2)
    assert stream[-1].at_s == pytest.approx(4000 / 20.0, rel=0.05)
    pauses = [b.at_s - a.at_s for a, b in itertools.pairwise(stream)]
    longer = sum(pause > 1 / 20.0 for pause in pauses) / len(pauses)
    assert longer == pytest.approx(math.exp(-1), abs=0.03)  # exponential, not regular
    assert {one.max_tokens for one in stream} == set(range(4, 10))


def test_percentiles_are_of_the_sample_and_fairness_is_jains() -> None:
    assert percentile_ms([0.003, 0.001, 0.002], 50) == 2.0
    assert percentile_ms([0.003, 0.001, 0.002], 99) == 3.0
    assert percentile_ms([], 50) is None
    assert jain([2.0, 2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) is None


def test_figures_count_from_when_a_request_was_due() -> None:
    answers = [
        Answer(due_s=10.0, stamps=((11.0, 1), (13.0, 4)), is_whole=True),
        Answer(due_s=11.0, stamps=((15.0, 2),), is_whole=True),
        Answer(due_s=12.0, stamps=((12.5, 1),), is_whole=False),
        Answer(due_s=13.0, stamps=(), is_whole=False),
    ]
    found = figures_of(answers, Bounds(ttft_s=2.0, itl_s=0.5))
    assert (found["num_requests"], found["completed"]) == (4, 2)
    assert found["completed_per_s"] == 2 / 5
    assert found["goodput_per_s"] == 1 / 5
    assert found["tokens_per_s"] == 7 / 5
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (1000.0, 4000.0)
    assert (found["itl_p50_ms"], found["itl_p99_ms"]) == (0.0, 500.0)
    assert found["gap_p99_ms"] == 2000.0
    assert found["fairness"] == pytest.approx(jain([5 / 3, 2 / 4]))
    strict = figures_of(answers, Bounds(ttft_s=2.0, itl_s=0.4))
    assert strict["goodput_per_s"] == 0.0


def test_nothing_completed_is_no_division_by_zero() -> None:
    found = figures_of([Answer(due_s=0.0, stamps=(), is_whole=False)], WIDE)
    assert (found["completed"], found["completed_per_s"], found["fairness"]) == (0, 0.0, None)


async def test_every_way_meets_every_rate_on_a_real_server(start) -> None:
    async with start() as running:
        rows, full_per_s = await sweep(running.address, TRAFFIC, [1.0, 2.0], WIDE)
    offered = [row.case["offered_per_s"] for row in rows]
    assert offered == [full_per_s] * 2 + [2.0 * full_per_s] * 2
    assert [row.case["way"] for row in rows] == [*WAYS, *reversed(WAYS)]
    for one in (row.figures for row in rows):
        assert one["completed"] == one["num_requests"] == 6
        assert 0 < one["goodput_per_s"] == one["completed_per_s"]


async def test_refused_requests_are_not_completed(start) -> None:
    unknown = Traffic(prompts=("abc", "a" * 5000), num_requests=8, max_tokens=4)
    async with start() as running:
        rows, _ = await sweep(running.address, unknown, [1.0], WIDE)
    asked = sum(len(one.prompt) < 5000 for one in arrivals(unknown, 500.0, seed=1))
    assert 0 < asked < 8
    assert [row.figures["completed"] for row in rows] == [asked] * 2
