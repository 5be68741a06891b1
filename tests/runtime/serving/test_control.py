"""On the wire: gamma is chosen where nobody says, a request may ask for it, and the server reports."""

from __future__ import annotations

import math

import pytest
from outrider.errors import CallError

from tests.runtime.gamma.test_controller import table


async def finish(running, **options):
    last = None
    async for response in running.client.generate("abcd", temperature=0.0, **options):
        last = response
    return last.finish


async def test_gamma_is_chosen_where_nobody_says_and_the_answer_says_when_it_was_zero(start):
    dear = table(c=5.0, slope=0.5)
    async with start(costs=dear) as running:
        auto = await finish(running, max_tokens=20)
        fixed = await finish(running, max_tokens=20, speculation={"gamma": 2})
        capped = await finish(running, max_tokens=20, speculation={"gamma": 2, "adaptive": True})
        info = await running.client.info()
    assert auto.speculation.off_reason == "NO_EXPECTED_GAIN"
    # The first token comes with the prompt, and the last pass has no room for a draft: that is nobody's choice.
    assert auto.speculation.num_off == 18
    assert not auto.speculation.is_on
    assert fixed.speculation.off_reason == ""
    assert fixed.speculation.num_off == 0
    assert fixed.speculation.num_drafted > 0
    assert capped.speculation.num_off == 18
    assert info.speculation.default_is_adaptive
    assert info.speculation.default_gamma == info.speculation.max_gamma == 4
    assert info.speculation.control.num_steps_off >= 37
    assert info.speculation.control.HasField("speed_up")


async def test_drafts_that_pay_are_reported_as_such(start):
    # On a clock that stands still the choice follows the table: these engines' own calls all take alike.
    async with start(costs=table(c=0.01), clock=lambda: 0.0) as running:
        done = await finish(running, max_tokens=60)
        info = await running.client.info()
    assert done.speculation.is_on
    assert done.speculation.off_reason == ""
    assert done.speculation.tokens_per_step > 2
    assert info.speculation.control.num_steps_on > 5


async def test_without_costs_nothing_is_chosen_and_nothing_claimed(start):
    async with start() as running:
        done = await finish(running, max_tokens=20)
        info = await running.client.info()
        with pytest.raises(CallError) as refused:
            await finish(running, max_tokens=20, speculation={"adaptive": True})
        off = await finish(running, max_tokens=20, speculation={"adaptive": True, "enabled": False})
    assert refused.value.reason == "UNSUPPORTED_OPTION"
    assert [one.field for one in refused.value.violations] == ["speculation.adaptive"]
    assert off.speculation.off_reason == "DISABLED"
    assert done.speculation.drafted_by_position[3] > 0
    assert not info.speculation.default_is_adaptive
    assert info.speculation.default_gamma == 4
    assert not info.speculation.HasField("control")


async def test_the_control_is_a_metric(start):
    async with start(costs=table(c=0.01)) as running:
        read = running.server.metrics.registry.get_sample_value
        assert math.isnan(read("outrider_control_speed_up"))
        await finish(running, max_tokens=40)
        assert read("outrider_control_steps_on_total") > 0
        assert read("outrider_control_speed_up") > 0


async def test_a_server_without_choice_has_gauges_without_values(start):
    async with start() as running:
        read = running.server.metrics.registry.get_sample_value
        assert math.isnan(read("outrider_control_regret"))
        assert read("outrider_control_steps_on_total") == 0


async def test_a_request_may_leave_the_drafter_to_the_server(start):
    async with start(costs=table(c=0.01)) as running:
        chosen = {
            (
                await finish(running, max_tokens=20, speculation={"drafter": "auto"})
            ).speculation.drafter
            for _ in range(4)
        }
        info = await running.client.info()
        with pytest.raises(CallError, match="auto stands alone"):
            await finish(running, max_tokens=20, speculation={"drafter": "auto+lookup"})
    # Each is tried once before any is trusted.
    assert chosen == {"model", "suffix+model", "suffix"}
    assert "auto" in info.speculation.drafters
