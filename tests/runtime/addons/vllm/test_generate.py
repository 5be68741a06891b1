"""vLLM's engine protocol: what a request may say, and what is answered."""

from __future__ import annotations

import json
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from outrider.errors import decode_error
from outrider.runtime.addons.vllm.wire import request_of
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.serving.requests.defaults import RequestDefaults
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.runtime.addons.vllm.requests import VLLM_GRPC, answers_of, ask, stub_of
from tests.runtime.conftest import EOS, VOCAB, Start
from tests.runtime.grammar import test_serving as constraints


async def test_a_stream_has_deltas_and_ends_with_a_summary(start):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        chunks, (summary,) = await answers_of(stub, ask(max_tokens=40))
        none, (whole,) = await answers_of(stub, ask(max_tokens=40, stream=False))
    expected = [i % 26 for i in range(3, 43)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 40
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert none == []
    for one in (summary, whole):
        assert list(one.output_ids) == expected
        assert (one.finish_reason, one.prompt_tokens, one.completion_tokens) == ("length", 3, 40)
        assert 0 < one.spec_accepted_tokens < one.spec_draft_tokens
        assert one.WhichOneof("matched_stop") is None


async def test_ids_are_fed_as_they_are(start):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        _, (of_ids,) = await answers_of(stub, ask([EOS, 5]))
        _, (of_text,) = await answers_of(stub, ask("abf"))
    assert (of_ids.prompt_tokens, of_text.prompt_tokens) == (2, 3)
    assert of_ids.output_ids == of_text.output_ids == [*range(6, 15)]


async def test_completions_of_a_prompt_have_their_index(start):
    sampled = {"temperature": 2.0, "seed": 5, "max_tokens": 20}
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        chunks, summaries = await answers_of(stub, ask(n=3, **sampled))
        _, (alone,) = await answers_of(stub, ask(stream=False, **sampled))
    found = {one.index: list(one.output_ids) for one in summaries}
    assert found.keys() == {0, 1, 2} and len({*map(tuple, found.values())}) == 3
    assert found[0] == list(alone.output_ids)
    for index, ids in found.items():
        own = [token for one in chunks if one.index == index for token in one.token_ids]
        assert own == ids


async def test_log_probabilities_of_answer_and_prompt(start):
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        chunks, _ = await answers_of(stub, ask(**asked))
        _, (whole,) = await answers_of(stub, ask(stream=False, **asked))
        plain, _ = await answers_of(stub, ask())
    streamed = vllm.GenerateComplete()
    for chunk in chunks:
        streamed.output_logprobs.MergeFrom(chunk.output_logprobs)
        streamed.input_logprobs.MergeFrom(chunk.input_logprobs)
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    assert not any(chunk.HasField("output_logprobs") for chunk in plain)
    for one in (streamed, whole):
        assert list(one.output_logprobs.token_ids) == [*range(3, 12)]
        assert all(-0.1 < value < 0.0 for value in one.output_logprobs.token_logprobs)
        assert [top.token_ids[0] for top in one.output_logprobs.top_logprobs] == [*range(3, 12)]
        assert {len(top.values) for top in one.output_logprobs.top_logprobs} == {2}
        assert list(one.input_logprobs.token_ids) == [0, 1, 2]
        has_value = [value.HasField("value") for value in one.input_logprobs.token_logprobs]
        assert has_value == [False, True, True]
        assert [list(top.token_ids) for top in one.input_logprobs.top_logprobs] == [[], [1], [2]]


async def test_a_long_scored_prompt_comes_in_several_chunks_before_any_token(start):
    prompt = [i % 26 for i in range(2500)]
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        chunks, _ = await answers_of(stub, ask(prompt, prompt_logprobs=0))
    ids = [token for chunk in chunks for token in chunk.input_logprobs.token_ids]
    assert ids == prompt
    assert [len(chunk.input_logprobs.token_ids) for chunk in chunks[:3]] == [1024, 1024, 452]
    assert [bool(chunk.token_ids) for chunk in chunks[:3]] == [False, False, True]


@pytest.mark.parametrize(
    ("params", "matched"),
    [
        ({"stop": ["fg"]}, ("matched_stop_str", "fg")),
        ({"stop_token_ids": [6]}, ("matched_token_id", 6)),
    ],
)
async def test_what_ended_an_answer_is_told(start, params, matched):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        _, (summary,) = await answers_of(stub, ask(**params))
    name = summary.WhichOneof("matched_stop")
    assert summary.finish_reason == "stop"
    assert (name, getattr(summary, name)) == matched
    assert list(summary.output_ids) == [3, 4, 5, 6]


async def test_a_beam_search_of_the_servers_defaults_has_a_summary_of_each_answer(start):
    defaults = RequestDefaults(search={"num_beams": 3})
    async with (
        start(serve_options=VLLM_GRPC, defaults=defaults) as run,
        stub_of(run.address) as stub,
    ):
        chunks, summaries = await answers_of(stub, ask(n=2))
    assert chunks == []
    assert [one.index for one in summaries] == [0, 1]
    assert list(summaries[0].output_ids) == [*range(3, 12)]
    assert {one.completion_tokens for one in summaries} == {9}


FORMS = {
    "json_schema": ({"json_schema": '{"enum": ["ab", 12]}'}, ('"ab"', "12")),
    "regex": ({"regex": "ab|ba"}, ("ab", "ba")),
    "grammar": ({"grammar": 'start: "ab" | "ba"'}, ("ab", "ba")),
    "choice": ({"choice": {"choices": ["ab", '"', "12"]}}, ("ab", '"', "12")),
}


async def test_answers_have_the_form_that_is_asked_for(start: Start):
    async with (
        constraints.starting(start, serve_options=VLLM_GRPC) as run,
        stub_of(run.address) as stub,
    ):
        for name, (constraint, texts) in FORMS.items():
            _, (summary,) = await answers_of(
                stub, ask(temperature=1.0, seed=3, grammar_from_first_token=True, **constraint)
            )
            ids = [token for token in summary.output_ids if token != EOS]
            assert run.serving.codec.decode(ids) in texts, name
            assert summary.finish_reason == "stop"
        _, (summary,) = await answers_of(stub, ask(json_object=True, temperature=1.0, seed=1))
        assert run.serving.codec.decode(summary.output_ids)[0] == "{"
        _, (summary,) = await answers_of(stub, ask(json_object=False))
        assert summary.completion_tokens


def test_zeros_are_as_left_out_and_numbers_are_what_was_written():
    params = {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: -0.1}, "seed": 4}
    request = request_of(ask([1], **params))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.logit_bias[3]) == (0.7, 0.9, -0.1)
    given = {field.name for field, _ in sampling.ListFields()}
    assert given == {"temperature", "top_p", "logit_bias", "seed"}
    empty = request_of(vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1])))
    assert {field.name for field, _ in empty.ListFields()} == {"tokens", "skip_special_tokens"}


async def test_what_a_request_leaves_open_is_the_servers_default(start):
    defaults = RequestDefaults(sampling={"temperature": 0.0, "top_k": 3})
    limits = RequestLimits(default_max_tokens=3)
    async with (
        start(serve_options=VLLM_GRPC, defaults=defaults, limits=limits) as run,
        stub_of(run.address) as stub,
    ):
        _, (summary,) = await answers_of(stub, vllm.GenerateRequest(text="abc"))
    assert list(summary.output_ids) == [3, 4, 5]


def with_field(**fields: object) -> vllm.GenerateRequest:
    request = ask()
    request.MergeFrom(vllm.GenerateRequest(**fields))
    return request


REFUSED: dict[str, vllm.GenerateRequest] = {
    "mm_inputs": with_field(mm_inputs=vllm.MultimodalInputs(im_token_id=1)),
    "extra_mm_inputs": with_field(extra_mm_inputs=[vllm.MultimodalInputs()]),
    "media_refs": with_field(media_refs=vllm.MediaRefs()),
    "kv_transfer_params": with_field(kv_transfer_params=vllm.KvTransferParams(remote_port=1)),
    "kv_transfer_params_json": with_field(kv_transfer_params_json="{}"),
    "data_parallel_rank": with_field(data_parallel_rank=1),
    "truncate_prompt_tokens": ask(truncate_prompt_tokens=3),
    "structural_tag": ask(structural_tag="{}"),
    "json_schema": ask(json_schema=""),
    "regex": ask(regex="a"),
    "choice": ask(choice={"choices": []}),
    "logprobs": ask(logprobs=-1),
    "prompt_logprobs": ask(prompt_logprobs=-1),
    "seed": ask(seed=-1),
    "logit_bias": ask(logit_bias={-1: 1.0}),
    "sampling.logit_bias": ask(logit_bias={VOCAB: 1.0}),
    "sampling.temperature": ask(temperature=float("nan")),
    "sampling.top_p": ask(top_p=1.5),
    "sampling.repetition_penalty": ask(repetition_penalty=9.0),
    "n": ask(n=99),
    "max_tokens": ask(max_tokens=0),
    "stop_token_ids": ask(stop_token_ids=[VOCAB]),
    "tokens.ids": ask([VOCAB]),
    "prompt": vllm.GenerateRequest(),
    "request_id": ask(name="a b"),
    "stop": ask(stop=["a"] * 9),
}


async def test_what_is_not_served_is_refused_by_name(start):
    async with start(serve_options=VLLM_GRPC) as run, stub_of(run.address) as stub:
        for name, request in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers_of(stub, request)
            error = decode_error(caught.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert [one.field for one in error.violations] == [name]
        _, (summary,) = await answers_of(stub, with_field(data_parallel_rank=0))
    assert summary.completion_tokens == 9


async def test_bytes_that_are_no_message_are_refused(start):
    async with (
        start(serve_options=VLLM_GRPC) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        calls: dict[str, Callable[..., grpc.aio.Call]] = {
            "Generate": channel.unary_stream,
            "Abort": channel.unary_unary,
        }
        for method, kind in calls.items():
            call = kind(f"/vllm.grpc.engine.VllmEngine/{method}")(b"\xff\xff", timeout=60)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            assert json.dumps(await call.details()).startswith('"the request is not'), method
