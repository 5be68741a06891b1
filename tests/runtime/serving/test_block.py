"""Block verification over the wire, and in the worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider import RequestRefused
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.loop.drafter_policy import SpeculationPolicy
from outrider.v1 import inference_pb2 as wire

from tests.runtime.markov import PAIRS, Harness, limits, spec

SEED_STABLE, LENIENT = wire.EXACTNESS_MODE_SEED_STABLE, wire.EXACTNESS_MODE_LENIENT
OFF = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0, block_verification=False)


async def report_of(running, **speculation):
    async for response in running.client.generate("ab", max_tokens=8, speculation=speculation):
        if response.HasField("finish"):
            return response.finish.speculation
    raise AssertionError("a stream ends with its finish")


async def test_a_request_may_ask_for_it(start):
    async with start(config=OFF) as running:
        asked = await report_of(running, block_verification=True)
        silent = await report_of(running)
        off = await report_of(running, block_verification=True, enabled=False)
        info = await running.client.info()
    assert asked.block_verification and asked.is_exact and asked.num_accepted > 0
    assert not silent.block_verification
    assert not off.block_verification
    assert not info.speculation.default_block_verification


async def test_it_is_the_default(start):
    async with start() as running:
        silent = await report_of(running)
        declined = await report_of(running, block_verification=False)
        stable = await report_of(running, mode=SEED_STABLE)
        info = await running.client.info()
    assert silent.block_verification
    assert not declined.block_verification
    assert not stable.block_verification
    assert info.speculation.default_block_verification


@pytest.mark.parametrize("mode", [SEED_STABLE, LENIENT])
async def test_another_mode_is_refused_by_name(start, mode):
    async with start() as running:
        with pytest.raises(RequestRefused) as caught:
            await report_of(running, block_verification=True, mode=mode)
        assert not (
            await report_of(running, block_verification=False, mode=mode)
        ).block_verification
    assert [one.field for one in caught.value.violations] == ["speculation.block_verification"]


def mean_tokens_per_step(is_on: bool, **options: object) -> float:
    harness = Harness("F4")
    for seed in range(5):
        harness.submit(
            f"r{seed}",
            seed=seed,
            max_tokens=90,
            temperature=1.0,
            speculation=SpeculationParams(
                drafter="model", gamma=6, verifies_block=is_on, is_adaptive=False, **options
            ),
        )
    harness.run()
    reports = [harness.finished(name).report for name in harness.events]
    assert all(report.verifies_block is is_on for report in reports)
    return sum(len(harness.tokens(n)) for n in harness.events) / sum(r.num_steps for r in reports)


def test_the_worker_keeps_more_tokens_per_pass() -> None:
    assert mean_tokens_per_step(True) > mean_tokens_per_step(False)


def test_greedy_answers_are_the_same() -> None:
    answers = []
    for is_on in (False, True):
        harness = Harness("F4")
        speculation = SpeculationParams(gamma=4, verifies_block=is_on, is_adaptive=False)
        harness.submit("a", max_tokens=40, speculation=speculation)
        harness.run()
        answers.append((harness.tokens("a"), harness.finished("a").report.num_steps))
    assert answers[0] == answers[1]


def test_it_goes_on_when_a_drafter_is_degraded() -> None:
    harness = Harness("F4")
    harness.submit(
        "a",
        temperature=1.0,
        speculation=SpeculationParams(verifies_block=True, mode=ExactnessMode.MAX_ACCEPT),
    )
    harness.worker.run_step()
    (request,) = harness.live
    request.degrade("lookup")
    assert request.speculation.verifies_block


@pytest.fixture
def harness() -> Harness:
    """One with a draft model that takes trees."""
    vocab_size, *logits = PAIRS["F4"]
    bounds = replace(limits(vocab_size), max_tree_nodes=16)
    target, draft = (ScriptedEngine(one, bounds) for one in logits)
    return Harness("F4", target=target, draft=draft)


@pytest.mark.parametrize(
    ("drafter", "is_on"),
    [("model", True), ("suffix+model", True), ("model/suffix", True), ("lookup+tree", False)],
)
def test_sampled_trees_are_chains_only_where_blocks_are_asked_for(
    harness: Harness, drafter: str, is_on: bool
) -> None:
    policy = harness.worker._policy
    silent = SpeculationParams(drafter=drafter, gamma=3)
    assert policy.resolve(silent).verifies_block is is_on
    assert policy.resolve(replace(silent, verifies_block=True)).verifies_block


def test_steps_on_a_device_judge_tokens_unless_blocks_are_asked_for(harness: Harness) -> None:
    policy = SpeculationPolicy(
        harness.worker._parts.drafters, ServerConfig(), 4, judges_blocks=False
    )
    silent = SpeculationParams(drafter="model", gamma=3)
    assert not policy.resolve(silent).verifies_block
    assert policy.resolve(replace(silent, verifies_block=True)).verifies_block


@pytest.mark.parametrize("arms", [("model", "tree"), ("tree", "model")])
def test_a_drafter_that_is_chosen_has_its_own_rule(harness: Harness, arms: tuple[str, ...]) -> None:
    config = ServerConfig(default_drafter="auto", auto_drafters=arms)
    policy = SpeculationPolicy(harness.worker._parts.drafters, config, 4)
    found = {}
    for number in range(2):
        chosen = policy.resolve_request(spec(f"{number}", temperature=1.0))
        found[chosen.drafter] = chosen.verifies_block
    assert found == {"model": True, "tree": False}
