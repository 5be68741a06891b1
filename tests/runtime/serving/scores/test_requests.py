"""Log-probabilities of prompts, echoed prompts and answers of no token, over the wire."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from outrider import CallError, build_request
from outrider.engines.sampling.draws import raw_logprobs
from outrider.runtime.cli.main import app
from outrider.runtime.core import events
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.v1 import generate_request
from outrider.runtime.serving.v1.generate_request import V1Request
from outrider.v1 import inference_pb2 as wire
from typer.testing import CliRunner

from tests.runtime.conftest import LetterCodec, next_letter


async def collect(stream):
    return [response async for response in stream]


def prompt_of(responses):
    return [token for response in responses for token in response.prompt]


async def test_a_prompt_comes_with_its_log_probabilities_on_the_first_response(start):
    async with start() as run:
        responses = await collect(
            run.client.generate("abcx", max_tokens=6, temperature=0, prompt_logprobs=2)
        )
        sample = run.server.metrics.registry.get_sample_value
        assert sample("outrider_scored_prompt_tokens_total") == 4
        assert (await run.client.info()).limits.max_prompt_logprobs == 5
    first, *others = prompt_of(responses[:1])
    assert not any(response.prompt for response in responses[1:])
    assert (first.id, first.HasField("logprob"), list(first.top)) == (0, False, [])
    for at, (token, ident) in enumerate(zip(others, (1, 2, 23), strict=True), start=1):
        found = raw_logprobs(next_letter((0, 1, 2)[:at]), ident, 2)
        assert (token.id, token.logprob) == (ident, found.logprob)
        assert [(one.id, one.logprob) for one in token.top] == list(found.top)
        assert token.provenance == wire.PROVENANCE_UNSPECIFIED
    assert "".join(response.text for response in responses) == "yzabcd"


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"echo": True}])
async def test_an_answer_of_no_token(start, asked):
    async with start() as run:
        responses = await collect(run.client.generate("abc", max_tokens=0, **asked))
    finish = responses[-1].finish
    assert finish.reason == wire.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (3, 0)
    assert not any(response.tokens for response in responses)
    assert "".join(response.text for response in responses) == ("abc" if "echo" in asked else "")
    ids = [0, 1, 2] if "prompt_logprobs" in asked else []
    assert [token.id for token in prompt_of(responses)] == ids


async def test_a_prompt_is_echoed_once_in_front_of_its_answer(start):
    async with start() as run:
        asked = {"echo": True, "temperature": 0, "max_tokens": 4, "stop": ["b"]}
        of_text = await collect(run.client.generate("abc é", **asked))
        of_tokens = await collect(run.client.generate([0, 1, 26], **asked))
        whole = await collect(run.client.generate([3, 27, 28], skip_special_tokens=False, **asked))
    # A stop string in the prompt ends nothing.
    assert "".join(response.text for response in of_text) == "abc écdef"
    assert "".join(response.text for response in of_tokens) == "ab "
    assert "".join(response.text for response in whole).startswith("dé</s>")
    assert of_tokens[-1].finish.stop_string == "b"


async def test_a_long_echo_comes_in_several_responses(start, monkeypatch):
    monkeypatch.setattr(generate_request, "MOST_TEXT", 5)
    async with start() as run:
        asked = {"n": 2, "echo": True, "max_tokens": 1, "temperature": 0}
        responses = await collect(run.client.generate([0, 1, 2, 3] * 4, **asked))
    for index in range(2):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == "abcd" * 4 + "e"
        assert all(len(response.text) <= 5 for response in own)
        assert own[-1].HasField("finish")


async def test_token_ids_are_decoded_beside_the_event_loop(start):
    class Noting(LetterCodec):
        def decode(self, ids, skip_special_tokens=True):
            if len(ids) > 1000:
                threads.append(threading.current_thread())
            return super().decode(ids, skip_special_tokens)

    threads = []
    async with start(codec=Noting(), max_context=2000) as run:
        await collect(run.client.generate([0] * 1024, echo=True, max_tokens=0))
    assert threads != []
    assert threading.main_thread() not in threads


async def test_a_long_prompt_comes_in_several_responses(start, monkeypatch):
    monkeypatch.setattr(events, "MOST_PROMPT_TOKENS", 5)
    async with start() as run:
        ids = [int(one) for one in np.random.default_rng(1).integers(0, 26, 17)]
        responses = await collect(run.client.generate(ids, max_tokens=1, prompt_logprobs=1))
    assert [len(response.prompt) for response in responses if response.prompt] == [5, 5, 5, 2]
    assert [token.id for token in prompt_of(responses)] == ids
    assert [token.HasField("logprob") for token in prompt_of(responses)] == [False] + [True] * 16
    assert not any(response.tokens for response in responses[:3])


class SteadyReader:
    """A connection whose client reads each response before long."""

    def __init__(self) -> None:
        self.left_s: list[float] = []

    async def write(self, data):
        # When the timeout around this write would end it.
        task = asyncio.current_task()
        self.left_s.append(task.stall.when())
        await asyncio.sleep(0)


async def test_each_response_of_a_long_prompt_has_a_stall_limit_of_its_own(start, monkeypatch):
    monkeypatch.setattr(events, "MOST_PROMPT_TOKENS", 10)
    timeout = asyncio.timeout

    def kept(when):
        asyncio.current_task().stall = timeout(when)
        return asyncio.current_task().stall

    async with start(stall_timeout_s=5.0) as run:
        reader = SteadyReader()
        data = build_request([0] * 50, max_tokens=0, prompt_logprobs=0).SerializeToString()
        call = V1Request(run.serving, data, ClientIdentity(), reader.write)
        monkeypatch.setattr(asyncio, "timeout", kept)
        await asyncio.create_task(run.server.readiness.handler.complete(call))
    assert len(reader.left_s) == 5
    assert sorted({*reader.left_s}) == reader.left_s


async def test_an_answer_of_no_token_needs_none_that_could_be_drawn(start):
    def banned(prefix):
        row = next_letter(prefix).copy()
        row[5] = -np.inf
        return row

    async with start(target=banned, draft=banned) as run:
        asked = {"allowed_token_ids": [5], "max_tokens": 0, "prompt_logprobs": 0}
        responses = await collect(run.client.generate("abc", **asked))
    assert [token.id for token in prompt_of(responses)] == [0, 1, 2]
    assert responses[-1].finish.reason == wire.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "num_beams": 2, "temperature": 0}, "prompt_logprobs"),
        ({"echo": True, "num_beams": 2, "temperature": 0}, "echo"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "sampling.min_tokens"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(start, options, field):
    async with start() as run:
        with pytest.raises(CallError) as refused:
            await collect(run.client.generate("abc", **options))
    assert refused.value.reason == "INVALID_PARAMETER"
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"echo": True}])
async def test_a_source_is_neither_scored_nor_echoed(start, options):
    async with start(max_source=8, target=lambda source, prefix: next_letter(prefix)) as run:
        with pytest.raises(CallError) as refused:
            await collect(run.client.generate([1, 2], **options))
    assert refused.value.reason == "UNSUPPORTED_OPTION"
    assert next(iter(options)) in str(refused.value)


async def test_the_command_prints_a_line_per_token_of_the_prompt(start):
    async with start() as run:
        options = ("--echo", "--prompt-logprobs", "1", "--max-tokens", "0")
        command = ["generate", "--address", run.address, "--prompt", "abx", *options]
        found = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert found.exit_code == 0, found.output
    logprobs = [raw_logprobs(next_letter((0, 1)[:at]), at, 1).logprob for at in (1, 2)]
    unlikely = raw_logprobs(next_letter((0, 1)), 23, 0).logprob
    assert found.stdout.splitlines() == [
        "abx",
        "       0          -",
        f"       1  {logprobs[0]:9.4f}  1 {logprobs[0]:.4f}",
        f"      23  {unlikely:9.4f}  2 {logprobs[1]:.4f}",
        f"log-probability {logprobs[0] + unlikely:.4f} of 2 tokens, {(logprobs[0] + unlikely) / 2:.4f} each",
    ]


@pytest.mark.parametrize("length", [1, 3, 300])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_of_several_completions_each_is_echoed_and_the_prompt_told_once(
    start, length, max_tokens
):
    prompt = ("abc" * 100)[:length]
    async with start() as run:
        asked = {"n": 3, "echo": True, "prompt_logprobs": 1, "temperature": 0}
        responses = await collect(run.client.generate(prompt, max_tokens=max_tokens, **asked))
        snapshot = run.serving.worker.snapshot()
    assert [token.id for token in prompt_of(responses)] == [0, 1, 2] * (length // 3) + [0] * (
        length % 3
    )
    begin = (ord(prompt[-1]) - ord("a") + 1) % 26
    answer = "abcdefghi"[begin : begin + max_tokens]
    for index in range(3):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == prompt + answer
        assert own[-1].finish.usage.output_tokens == max_tokens
    assert snapshot.num_free_slots == snapshot.num_slots
