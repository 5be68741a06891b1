"""Several completions of one prompt as a client sees them: one stream, pieces by index, one end of the call."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import grpc
import numpy as np
import pytest
from outrider import CallCancelled, CallError
from outrider.runtime.core.errors import EngineRestart
from outrider.runtime.core.events import Failed, Finished
from outrider.runtime.core.params import sample_seed
from outrider.runtime.serving.response_stream import (
    EventDispatcher,
    GroupResponseStream,
    ResponseStream,
)

from tests.runtime.conftest import ENDS_AT_ONCE, EOS, VOCAB
from tests.runtime.markov import Harness, spec

PROMPT = "how many"


def undecided(prefix):
    """Logits that depend on the whole text, with an end now and then."""
    row = np.random.default_rng([len(prefix), *prefix]).normal(size=VOCAB)
    row[EOS] += 0.5
    return (1.5 * row).astype(np.float32)


async def by_index(stream):
    pieces = defaultdict(list)
    async for response in stream:
        pieces[response.index].append(response)
    return pieces


def tokens_of(pieces):
    return [token.id for piece in pieces for token in piece.tokens]


@pytest.mark.parametrize("interval_s", [0.0, 0.01])
async def test_each_completion_is_that_of_its_own_seed(start, interval_s):
    config = replace(ENDS_AT_ONCE, message_interval_s=interval_s)
    async with start(target=undecided, draft=undecided, config=config) as run:
        found = await by_index(
            run.client.generate(PROMPT, n=4, seed=3, max_tokens=40, logprobs=1, return_trace=True)
        )
        count = run.server.metrics.registry.get_sample_value
        counted = {
            name: count(f"outrider_{name}")
            for name in (
                "samples_total",
                "requests_admitted_total",
                "prompt_tokens_total",
                "generation_tokens_total",
                "time_to_first_token_seconds_count",
                "e2e_request_latency_seconds_count",
            )
        }
        alone = [
            await by_index(
                run.client.generate(
                    PROMPT, seed=found[index][-1].finish.seed, max_tokens=40, logprobs=1
                )
            )
            for index in range(4)
        ]
        snapshot = run.serving.worker.snapshot()
    assert sorted(found) == [0, 1, 2, 3]
    for index, answer in enumerate(alone):
        mine, its = found[index], answer[0]
        assert tokens_of(mine) == tokens_of(its)
        assert "".join(one.text for one in mine) == "".join(one.text for one in its)
        finish, other = mine[-1].finish, its[-1].finish
        assert finish.seed == sample_seed(3, index)
        assert (finish.reason, finish.usage) == (other.reason, other.usage)
        assert finish.usage.prompt_tokens == len(PROMPT)
        assert not any(one.HasField("finish") for one in mine[:-1])
        assert sum(s.num_accepted + s.HasField("next_token") for p in mine for s in p.steps) == len(
            tokens_of(mine)
        )
    assert len({tuple(tokens_of(one)) for one in found.values()}) == 4
    assert counted == {
        "samples_total": 4,
        "requests_admitted_total": 1,
        "prompt_tokens_total": len(PROMPT),
        "generation_tokens_total": sum(len(tokens_of(one)) for one in found.values()),
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }
    assert snapshot.num_free_slots == snapshot.num_slots


async def test_an_abort_and_a_client_that_leaves_end_all(start_endless):
    async with start_endless() as run:
        stream = run.endless(request_id="g", n=4)
        await anext(stream)
        assert run.serving.worker.snapshot().num_running == 4
        assert await run.client.abort("g") == ["g"]
        with pytest.raises(CallCancelled):
            await by_index(stream)
        stream = run.endless(n=4)
        await anext(stream)
        await stream.aclose()
        # All slots are needed, so that it begins when the others have ended.
        found = await by_index(run.client.generate("a", n=4, max_tokens=2))
        assert [len(tokens_of(found[index])) for index in range(4)] == [2] * 4


async def test_where_one_fails_the_call_fails(start):
    def fragile(prefix):
        return np.full(VOCAB, np.nan, dtype=np.float32) if 5 in prefix else undecided(prefix)

    async with start(target=fragile, draft=undecided) as run:
        with pytest.raises(CallError) as failed:
            await by_index(run.client.generate("a", n=4, seed=1, max_tokens=500, ignore_eos=True))
        found = await by_index(run.client.generate("a", n=4, max_tokens=1))
    assert failed.value.code == grpc.StatusCode.INTERNAL
    assert len(found) == 4


async def test_the_server_says_how_many_it_serves(start):
    async with start(max_batch=3) as run:
        info = await run.client.info()
        assert len(await by_index(run.client.generate("a", n=2, best_of=2, max_tokens=1))) == 2
        refused = []
        for options in ({"n": 4}, {"n": 0}, {"n": 2, "best_of": 3}):
            with pytest.raises(CallError) as caught:
                await by_index(run.client.generate("a", **options))
            refused.append((caught.value.reason, [one.field for one in caught.value.violations]))
    assert info.limits.max_n == 3
    assert refused == [
        ("INVALID_PARAMETER", ["n"]),
        ("INVALID_PARAMETER", ["n"]),
        ("UNSUPPORTED_OPTION", ["best_of"]),
    ]


def group_of(num, harness, **options):
    """The streams of a group that a worker serves."""
    dispatcher, has_events = EventDispatcher(asyncio.get_running_loop()), asyncio.Event()
    harness.worker.after_step(dispatcher.send)
    streams = [
        ResponseStream(dispatcher, 100, lambda: None, index=index, has_events=has_events, **options)
        for index in range(num)
    ]
    return GroupResponseStream(streams, has_events), [one.deliver for one in streams]


async def test_completions_take_turns():
    harness = Harness("F3")
    group, delivers = group_of(3, harness)
    specs = spec("a", (1,), num_samples=3, max_tokens=3, gamma=0).samples()
    harness.worker.submit_group(specs, delivers)
    harness.worker.run_step()
    first = [await group.take() for _ in range(2)]
    harness.worker.run_step()
    await asyncio.sleep(0)
    then = [await group.take() for _ in range(3)]
    assert [batch.index for batch in (*first, *then)] == [0, 1, 2, 0, 1]
    assert [len(batch.tokens) for batch in (*first, *then)] == [1, 1, 2, 1, 1]
    harness.worker.run_step()
    last = [await group.take() for _ in range(3)]
    assert sorted(batch.index for batch in last) == [0, 1, 2]
    assert all(isinstance(batch.end, Finished) for batch in last)
    assert (group.is_ended, group.num_tokens) == (True, 9)


async def test_a_cut_ends_a_group():
    group, _ = group_of(2, Harness("F3"))
    group.cut(EngineRestart(0))
    assert isinstance((await group.take()).end, Failed)
    assert not group.is_ended
