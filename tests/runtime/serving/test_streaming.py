"""What a client sees of a completion that goes well."""

import asyncio

import pytest
from outrider import CallCancelled, CallError
from outrider.v1 import inference_pb2 as wire


async def collect(stream):
    return [response async for response in stream]


async def test_text_and_tokens_add_up_and_the_last_response_finishes(start):
    async with start() as run:
        responses = await collect(run.client.generate("abc", max_tokens=10, temperature=0))
    assert "".join(r.text for r in responses) == "defghijklm"
    tokens = [token.id for r in responses for token in r.tokens]
    assert tokens == list(range(3, 13))
    assert [r.HasField("finish") for r in responses[:-1]] == [False] * (len(responses) - 1)
    finish = responses[-1].finish
    assert finish.reason == wire.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (3, 10)


async def test_provenance_and_trace_add_up_with_the_tokens_and_the_report(start):
    async with start() as run:
        responses = await collect(
            run.client.generate(
                "a", max_tokens=40, temperature=0, return_provenance=True, return_trace=True
            )
        )
    tokens = [token for r in responses for token in r.tokens]
    steps = [step for r in responses for step in r.steps]
    report = responses[-1].finish.speculation
    traced = []
    for step in steps:
        traced += step.drafted[: step.num_accepted]
        traced += [step.next_token] if step.HasField("next_token") else []
    assert traced == [token.id for token in tokens]
    kinds = [token.provenance for token in tokens]
    assert kinds.count(wire.PROVENANCE_ACCEPTED) == sum(step.num_accepted for step in steps)
    assert wire.PROVENANCE_RECOVERED in kinds and wire.PROVENANCE_BONUS in kinds
    assert report.num_steps == len(steps) and report.num_accepted > 0 and report.is_on
    recovered = [t.id for t in tokens if t.provenance == wire.PROVENANCE_RECOVERED]
    assert set(recovered) == {5}, "the draft errs after e only, and the target says f"
    texts = "".join("".join(s.drafted_text[: s.num_accepted]) + s.next_text for s in steps)
    assert texts == "".join(r.text for r in responses)


@pytest.mark.parametrize("options", [{"stop": ["i"]}, {"stop_token_ids": [8]}])
async def test_a_trace_ends_with_the_completion_inside_an_accepted_run(start, options):
    """Rounds are b, c d e f, g h i j k: the last ends before the token that the target adds."""
    async with start() as run:
        responses = await collect(
            run.client.generate("a", temperature=0, return_trace=True, **options)
        )
    *_, last = [step for r in responses for step in r.steps]
    tokens = [token.id for r in responses for token in r.tokens]
    assert list(last.drafted)[:3] == tokens[-3:] == [6, 7, 8]
    assert last.num_accepted == 3
    assert not last.HasField("next_token") and last.next_text == ""


@pytest.mark.parametrize(("include", "text"), [(False, "cd"), (True, "cdefg")])
async def test_stop_string(start, include, text):
    async with start() as run:
        responses = await collect(
            run.client.generate(
                "ab", temperature=0, stop=["efg"], include_stop_str_in_output=include
            )
        )
    assert "".join(r.text for r in responses) == text
    finish = responses[-1].finish
    assert (finish.reason, finish.stop_string) == (wire.FINISH_REASON_STOP_STRING, "efg")


async def test_stop_token(start):
    async with start() as run:
        responses = await collect(run.client.generate([0], temperature=0, stop_token_ids=[6]))
    finish = responses[-1].finish
    assert (finish.reason, finish.stop_token) == (wire.FINISH_REASON_STOP_TOKEN, 6)


@pytest.mark.parametrize("gamma", [0, 3])
async def test_no_pair_of_prompt_and_answer_comes_twice(start, gamma):
    async with start() as run:
        asked = {"temperature": 0, "max_tokens": 4, "speculation": {"gamma": gamma}}
        responses = await collect(run.client.generate("abca", no_repeat_ngram_size=2, **asked))
    assert "".join(r.text for r in responses) == "acde"


async def test_unset_seed_is_drawn_reported_and_reproduces(start):
    async with start() as run:
        first = await collect(run.client.generate("a", max_tokens=30, temperature=2.0))
        other = await collect(run.client.generate("a", max_tokens=30, temperature=2.0))
        seed = first[-1].finish.seed
        again = await collect(run.client.generate("a", max_tokens=30, temperature=2.0, seed=seed))
    assert 0 <= seed < 2**63 and other[-1].finish.seed != seed
    assert "".join(r.text for r in again) == "".join(r.text for r in first)


async def test_logprobs_come_when_asked(start):
    async with start() as run:
        responses = await collect(run.client.generate("a", max_tokens=5, temperature=0, logprobs=3))
    tokens = [token for r in responses for token in r.tokens]
    assert all(t.HasField("logprob") and len(t.top) == 3 for t in tokens)
    assert all(t.top[0].id == t.id and t.top[0].logprob == t.logprob for t in tokens)


async def test_speculation_off_says_why(start):
    async with start() as run:
        responses = await collect(
            run.client.generate("a", max_tokens=5, speculation={"enabled": False})
        )
    report = responses[-1].finish.speculation
    assert not report.is_on and report.off_reason and report.num_drafted == 0


async def test_tokenize_and_info(start):
    async with start() as run:
        assert await run.client.tokenize("abc") == [0, 1, 2]
        info = await run.client.info()
    assert (info.model, info.limits.max_tokens) == ("letters", 4096)
    assert {"model", "lookup", "none", "ouroboros"} <= set(info.speculation.drafters)
    assert info.load.num_free_slots == info.load.num_slots == 4


async def test_many_streams_are_all_answered_and_slots_come_back(start):
    async with start() as run:
        jobs = [
            collect(run.client.generate([i % 26], max_tokens=20 + i, temperature=0))
            for i in range(24)
        ]
        answers = await asyncio.gather(*jobs)
        snapshot = run.serving.worker.snapshot()
    for i, responses in enumerate(answers):
        tokens = [token.id for r in responses for token in r.tokens]
        assert tokens == [(i + 1 + j) % 26 for j in range(20 + i)]
    assert snapshot.num_free_slots == snapshot.num_slots


async def test_abort_ends_the_stream_and_frees_the_slot(start_endless):
    async with start_endless() as run:
        stream = run.endless(request_id="mine")
        await anext(stream)
        assert await run.client.abort("mine", "unknown") == ["mine"]
        with pytest.raises(CallCancelled) as caught:
            await collect(stream)
        snapshot = run.serving.worker.snapshot()
    assert caught.value.reason == "ABORTED_BY_RPC"
    assert snapshot.num_free_slots == snapshot.num_slots


async def test_leaving_the_stream_frees_the_slot(start_endless):
    async with start_endless(max_batch=1) as run:
        stream = run.endless()
        await anext(stream)
        await stream.aclose()
        # One slot only: the next request runs because the first one's came back.
        responses = await collect(run.client.generate("a", max_tokens=3, temperature=0))
        metrics = run.server.metrics.registry
        cancelled = metrics.get_sample_value(
            "outrider_requests_finished_total",
            {"code": "CANCELLED", "reason": "CLIENT_CANCELLED"},
        )
    assert "".join(r.text for r in responses) == "bcd"
    assert cancelled == 1


@pytest.mark.parametrize(
    ("speculation", "field", "reason"),
    [
        ({"drafter": "lookup/model"}, "speculation.drafter", "INVALID_PARAMETER"),
        ({"drafter": "lookup+"}, "speculation.drafter", "INVALID_PARAMETER"),
        ({"phrase_length": 3}, "speculation.phrase_length", "INVALID_PARAMETER"),
        ({"drafter": "phrases", "phrase_length": 0}, "speculation.phrase_length", "INVALID_PARAMETER"),
        ({"drafter": "phrases", "phrase_length": 17}, "speculation.phrase_length", "INVALID_PARAMETER"),
        ({"drafter": "lookup", "num_phrases": 2}, "speculation.num_phrases", "INVALID_PARAMETER"),
        ({"drafter": "ouroboros", "num_phrases": 17}, "speculation.num_phrases", "INVALID_PARAMETER"),
        ({"drafter": "ouroboros", "window": 33}, "speculation.window", "INVALID_PARAMETER"),
        # Its models take no trees.
        ({"drafter": "ouroboros", "window": 3}, "speculation.window", "INVALID_PARAMETER"),
        ({"drafter": "ouroboros", "num_phrases": 2}, "speculation.num_phrases", "INVALID_PARAMETER"),
        ({"drafter": "lookahead", "window": 2, "gamma": 4}, "speculation.window", "INVALID_PARAMETER"),
        ({"drafter": "phrases", "window": 4}, "speculation.window", "INVALID_PARAMETER"),
        ({"drafter": "model", "branching": [2]}, "speculation.branching", "INVALID_PARAMETER"),
        ({"drafter": "lookup", "reference": "ab"}, "speculation.reference", "INVALID_PARAMETER"),
        ({"drafter": "reference", "reference": "a" * 65537}, "speculation.reference", "INVALID_PARAMETER"),
    ],
)  # fmt: skip
async def test_drafter_parameters_are_refused_by_name(
    start, speculation: dict[str, object], field: str, reason: str
) -> None:
    async with start() as running:
        with pytest.raises(CallError) as refusal:
            async for _ in running.client.generate("abc", speculation=speculation):
                pass
    assert refusal.value.reason == reason
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    "speculation",
    [
        {"drafter": "reference", "reference": "xyzabcdefghijklmnopqrstuvwxyz"},
        {"drafter": "model/phrases", "phrase_length": 2},
        {"drafter": "ouroboros", "phrase_length": 3},
        {"drafter": "lookahead", "phrase_length": 3, "num_phrases": 2},
        {"drafter": "reference+suffix+lookup+phrases"},
    ],
)
async def test_a_drafter_is_asked_for_over_the_wire(start, speculation: dict[str, object]) -> None:
    async with start() as running:
        options = {"max_tokens": 30, "temperature": 0.0}
        text = ""
        async for chunk in running.client.generate(
            "xyzab", speculation={**speculation, "gamma": 4}, **options
        ):
            text += chunk.text
            finish = chunk.finish
    assert text == "cdefghijklmnopqrstuvwxyzabcdef"
    assert finish.speculation.drafter == speculation["drafter"]
    assert finish.speculation.num_accepted > 0
