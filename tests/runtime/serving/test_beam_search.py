"""A beam search as a client sees it: one response with ranked completions, beside streams, and its slots back."""

import asyncio

import grpc
import numpy as np
import pytest
from outrider import CallCancelled, CallError
from outrider.runtime.loop.beams.beam import BeamRules
from outrider.v1 import inference_pb2 as wire

from tests.runtime.conftest import ALPHABET, EOS, VOCAB
from tests.runtime.loop.beams.test_beam import plain


def likes_neighbours(prefix):
    """Logits that depend on the whole text, with an end now and then."""
    row = np.random.default_rng([len(prefix), *prefix]).normal(size=VOCAB).astype(np.float32)
    return (3.0 * row).astype(np.float32)


def expected(prompt, *, num_beams, max_tokens, penalty=1.0, **stopping):
    def row_of(tokens):
        row = likes_neighbours((*prompt, *tokens)).astype(np.float64)
        return row - np.log(np.exp(row).sum())

    rules = BeamRules(
        num_beams=num_beams,
        max_tokens=max_tokens,
        end_tokens=frozenset({EOS}),
        length_penalty=penalty,
        **stopping,
    )
    return plain(row_of, rules)


async def collect(stream):
    return [response async for response in stream]


@pytest.mark.parametrize("speculation", [{"enabled": False}, {"gamma": 3}, {}])
async def test_one_response_has_the_ranked_completions(start, speculation):
    async with start(target=likes_neighbours) as run:
        responses = await collect(
            run.client.generate(
                [1, 2],
                num_beams=4,
                n=3,
                max_tokens=7,
                length_penalty=0.5,
                speculation=speculation,
            )
        )
        snapshot = run.serving.worker.snapshot()
        count = run.server.metrics.registry.get_sample_value
        counted = count("outrider_beam_searches_total"), count("outrider_generation_tokens_total")
    found = expected((1, 2), num_beams=4, max_tokens=7, penalty=0.5)[:3]
    (response,) = responses
    finish = response.finish
    assert [tuple(beam.token_ids) for beam in finish.beams] == [tokens for tokens, _ in found]
    for beam, (tokens, total) in zip(finish.beams, found, strict=True):
        ends = tokens[-1] == EOS
        assert beam.text == "".join(ALPHABET[token] for token in tokens if token != EOS)
        assert beam.logprob == pytest.approx(total, abs=1e-5)
        assert beam.score == pytest.approx(total / len(tokens) ** 0.5, abs=1e-5)
        assert beam.reason == (wire.FINISH_REASON_STOP_TOKEN if ends else wire.FINISH_REASON_LENGTH)
        assert beam.HasField("stop_token") == ends
    best = finish.beams[0]
    assert (response.text, [t.id for t in response.tokens]) == (best.text, list(best.token_ids))
    assert finish.reason == best.reason
    num_tokens = sum(len(tokens) for tokens, _ in found)
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (2, num_tokens)
    report = finish.speculation
    assert not report.is_on and report.num_drafted == 0
    assert report.is_exact and report.num_steps <= 7
    assert snapshot.num_free_slots == snapshot.num_slots
    assert counted == (1, num_tokens)


async def test_by_default_the_best_completion_is_given_and_the_search_is_exact(start):
    async with start(target=likes_neighbours) as run:
        (early,) = await collect(
            run.client.generate([3], num_beams=3, max_tokens=9, early_stopping=True)
        )
        (usual,) = await collect(
            run.client.generate([3], num_beams=3, max_tokens=9, temperature=0, n=1)
        )
        (full,) = await collect(
            run.client.generate([3], num_beams=3, max_tokens=9, exhaustive_search=True)
        )
    for response, stopping in (
        (early, {"stops_early": True}),
        (usual, {}),
        (full, {"is_exhaustive": True}),
    ):
        tokens, _ = expected((3,), num_beams=3, max_tokens=9, **stopping)[0]
        assert [tuple(beam.token_ids) for beam in response.finish.beams] == [tokens]


async def test_searches_and_streams_are_served_together(start):
    async with start(target=likes_neighbours) as run:
        options = [
            {"num_beams": 2 + index % 3, "max_tokens": 5}
            if index % 2
            else {"max_tokens": 9, "temperature": 1.0, "seed": index}
            for index in range(12)
        ]

        async def ask(index):
            return await collect(run.client.generate([index], **options[index]))

        together = await asyncio.gather(*(ask(index) for index in range(12)))
        alone = [await ask(index) for index in range(12)]
        snapshot = run.serving.worker.snapshot()
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        tokens = [[t.id for r in responses for t in r.tokens] for responses in (one, other)]
        assert tokens[0] == tokens[1]
        if index % 2:
            found = expected((index,), num_beams=2 + index % 3, max_tokens=5)
            assert tuple(tokens[0]) == found[0][0]
            assert list(one[-1].finish.beams) == list(other[-1].finish.beams)
    assert snapshot.num_free_slots == snapshot.num_slots


async def test_an_aborted_search_gives_its_slots_back(start_endless):
    loop, is_searching = asyncio.get_running_loop(), asyncio.Event()

    def telling(prefix):
        if len(prefix) == 4:
            loop.call_soon_threadsafe(is_searching.set)
        return likes_neighbours(prefix)

    async with start_endless(target=telling) as run:
        search = asyncio.create_task(
            collect(
                run.client.generate(
                    "a", request_id="s", num_beams=4, max_tokens=4000, ignore_eos=True
                )
            )
        )
        await is_searching.wait()
        assert await run.client.abort("s") == ["s"]
        with pytest.raises(CallCancelled):
            await search
        responses = await collect(run.client.generate("a", num_beams=4, max_tokens=2))
        assert len(responses[-1].finish.beams) == 1
        snapshot = run.serving.worker.snapshot()
    assert snapshot.num_free_slots == snapshot.num_slots


async def test_the_server_says_how_many_beams_it_serves(start):
    async with start(max_batch=3) as run:
        info = await run.client.info()
        with pytest.raises(CallError) as refused:
            await collect(run.client.generate("a", num_beams=4))
        with pytest.raises(CallError) as drawn:
            await collect(run.client.generate("a", num_beams=2, temperature=0.7))
    assert info.limits.max_beams == 3
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in refused.value.violations] == ["num_beams"]
    assert [violation.field for violation in drawn.value.violations] == ["sampling.temperature"]
