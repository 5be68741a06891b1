"""Trees of sampled candidates, over the wire."""

from __future__ import annotations

import pytest
from outrider import RequestRefused
from outrider.v1 import inference_pb2 as wire


async def test_it_is_asked_for_over_the_wire(start) -> None:
    async with start(max_tree_nodes=32) as running:
        async for chunk in running.client.generate(
            "xyzab",
            max_tokens=24,
            temperature=0.5,
            speculation={"drafter": "tree", "branching": [3, 2], "gamma": 4},
        ):
            finish = chunk.finish
        assert finish.speculation.drafter == "tree"
        assert finish.speculation.num_accepted > 0
        assert finish.speculation.num_drafted > 4 * finish.speculation.num_steps
        for branching in ([2, 0], [17], [1] * 17):
            with pytest.raises(RequestRefused) as refusal:
                await anything(running, drafter="tree", branching=branching)
            assert [one.field for one in refusal.value.violations] == ["speculation.branching"]
    async with start() as running:
        with pytest.raises(RequestRefused) as refusal:
            await anything(running, drafter="tree")
        assert [one.field for one in refusal.value.violations] == ["speculation.drafter"]


async def anything(running, **speculation: object) -> wire.GenerateResponse:
    async for response in running.client.generate("ab", speculation=speculation):
        last = response
    return last
