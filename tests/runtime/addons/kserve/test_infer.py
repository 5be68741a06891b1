"""One request of the Open Inference Protocol: what it may say, and what is answered."""

from __future__ import annotations

import json
import math

import grpc
import grpc.aio
import pytest
from outrider.engines.sampling.base import TokenLogprobs
from outrider.errors import decode_error
from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve.response import Answer
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.events import EmittedToken, Provenance
from outrider.runtime.serving.requests.defaults import RequestDefaults
from outrider.runtime.serving.response_stream import Batch

from tests.runtime.addons.kserve.requests import (
    KSERVE,
    answers_of,
    counts_of,
    infer_request,
    streamed,
    stub_of,
    texts_of,
)
from tests.runtime.conftest import LetterCodec

GREEDY = {"temperature": 0.0, "max_tokens": 5}


async def test_an_answer_begins_with_the_prompt_unless_it_is_excluded(start):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        response = await stub.ModelInfer(infer_request(name="7", **GREEDY))
        alone = await stub.ModelInfer(
            infer_request(inputs={"exclude_input_in_output": True}, **GREEDY)
        )
        echoed = await stub.ModelInfer(infer_request(echo=True, **GREEDY))
    assert texts_of(response) == texts_of(echoed) == ["abcdefgh"]
    assert texts_of(alone) == ["defgh"]
    assert (response.model_name, response.model_version, response.id) == ("letters", "1", "7")
    assert not response.parameters


async def test_outputs_are_those_that_are_asked_for(start):
    names = ("token_ids", "finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")
    drafts = ("num_drafted_tokens", "num_accepted_tokens")
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        response = await stub.ModelInfer(
            infer_request(outputs=[*names, *drafts], logprobs=1, n=2, **GREEDY)
        )
        by_inputs = await stub.ModelInfer(
            infer_request(
                inputs={"return_finish_reason": True, "return_logprobs": True}, stop="f", **GREEDY
            )
        )
    assert [one.name for one in response.outputs] == [*names, *drafts]
    assert counts_of(response, "token_ids") == [3, 4, 5, 6, 7] * 2
    assert counts_of(response, "num_output_tokens") == [5, 5]
    assert counts_of(response, "num_input_tokens") == [3]
    assert texts_of(response, "finish_reason") == ["length", "length"]
    drafted, accepted = (counts_of(response, name) for name in drafts)
    assert all(0 < kept <= made for kept, made in zip(accepted, drafted, strict=True))
    first, *_ = json.loads(texts_of(response, "logprobs")[0])
    assert first["3"]["decoded_token"] == "d" and -0.1 < first["3"]["logprob"] < 0.0
    assert [one.name for one in by_inputs.outputs] == ["text_output", "finish_reason", "logprobs"]
    assert texts_of(by_inputs, "finish_reason") == ["stop"]
    assert texts_of(by_inputs, "logprobs") == ["null"]


def test_what_cannot_occur_has_a_log_probability_that_json_knows():
    impossible = TokenLogprobs(logprob=-math.inf, top=((4, 0.0), (5, -math.inf)))
    token = EmittedToken(token=3, provenance=Provenance.BONUS, logprobs=impossible)
    answer = Answer()
    answer.add(Batch(tokens=(token,), text="d", steps=(), end=None), LetterCodec())
    (found,) = [json.loads(one, parse_constant=pytest.fail) for one in answer.logprobs]
    assert {i: one["logprob"] for i, one in found.items()} == {"3": -9999.0, "4": 0.0, "5": -9999.0}


async def test_tensors_may_have_contents_instead_of_raw_bytes(start):
    request = oip.ModelInferRequest()
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"abc")
    excludes = request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    excludes.contents.bool_contents.append(True)
    for name, value in GREEDY.items():
        setattr(request.parameters[name], "double_param" if value == 0.0 else "int64_param", value)
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        assert texts_of(await stub.ModelInfer(request)) == ["defgh"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": "0", "max_tokens": "3", "ignore_eos": "True", "seed": None}, "def"),
        ({"temperature": 0, "max_tokens": 3, "top_k": -1, "speculation": {"gamma": 2}}, "def"),
        ({"temperature": 0, "max_tokens": 9, "stop": "g"}, "def"),
        ({"temperature": 0, "max_tokens": 9, "stop": ["x", "g"]}, "def"),
        ({"temperature": 0, "max_tokens": 2, "logit_bias": {"0": 50.0}}, "aa"),
        ({"temperature": 0, "max_tokens": 2, "allowed_token_ids": [1, 2]}, "bc"),
        (
            {"max_tokens": 2, "allowed_token_ids": ["1"], "speculation": {"mode": "seed_stable"}},
            "bb",
        ),
        ({"temperature": 0, "max_tokens": 3, "priority": -5, "best_of": 1}, "def"),
    ],
)
async def test_options_are_those_of_the_wire_as_json_or_as_texts(start, options, text):
    request = infer_request(inputs={"exclude_input_in_output": True}, **options)
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        assert texts_of(await stub.ModelInfer(request)) == [text]


async def test_what_a_request_leaves_open_is_the_servers_default(start):
    defaults = RequestDefaults(sampling={"temperature": 0.0}, max_tokens=3)
    limits = RequestLimits(default_max_tokens=3)
    async with (
        start(serve_options=KSERVE, defaults=defaults, limits=limits) as run,
        stub_of(run.address) as stub,
    ):
        assert texts_of(await stub.ModelInfer(infer_request())) == ["abcdef"]


async def test_a_beam_search_answers_with_all_that_it_found(start):
    asked = {"num_beams": 3, "n": 2, "max_tokens": 3}
    outputs = ("text_output", "num_output_tokens")
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        whole = await stub.ModelInfer(infer_request(outputs=outputs, **asked))
        (answer,) = await answers_of(stub, streamed(outputs=outputs, **asked))
    assert texts_of(whole)[0] == "abcdef"
    assert counts_of(whole, "num_output_tokens") == [3, 3]
    assert texts_of(answer.infer_response) == [text[3:] for text in texts_of(whole)]


def changed(change, **more) -> oip.ModelInferRequest:
    request = infer_request(**more)
    change(request)
    return request


def name_twice(request):
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


REFUSED = {
    "no text": (infer_request(None), "text_input: is required"),
    "a text that is none": (
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"\x01\0\0\0\xff")),
        "text_input: must be UTF-8",
    ),
    "a length beyond the bytes": (
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"\xff\xff\xff\xffabc")),
        "text_input: must be one element",
    ),
    "a length short of the bytes": (
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"\x01\0\0\0abc")),
        "text_input: must be one element",
    ),
    "no length": (
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"abc")),
        "text_input: must be one element",
    ),
    "a wide truth": (
        changed(
            lambda r: r.raw_input_contents.__setitem__(1, b"\0\1"),
            inputs={"exclude_input_in_output": True},
        ),
        "exclude_input_in_output: must be one byte",
    ),
    "fewer raw entries than inputs": (
        changed(lambda r: r.raw_input_contents.pop(), **GREEDY),
        "raw_input_contents: must have one entry per input",
    ),
    "raw entries and contents": (
        changed(lambda r: r.inputs[0].contents.bytes_contents.append(b"a")),
        "text_input: must leave out contents",
    ),
    "no contents": (
        changed(lambda r: r.raw_input_contents.pop()),
        "text_input: must have one element",
    ),
    "two elements": (
        changed(lambda r: r.inputs[0].shape.__setitem__(0, 2)),
        "text_input: must have shape [1]",
    ),
    "a type": (
        changed(lambda r: setattr(r.inputs[0], "datatype", "FP32")),
        "text_input: must have datatype BYTES",
    ),
    "an unknown input": (infer_request(inputs={"image": "a"}), "inputs: each must be one of"),
    "an input twice": (changed(name_twice), "text_input: must be given once"),
    "shared memory": (
        changed(lambda r: r.inputs[0].parameters["shared_memory_region"].SetInParent()),
        "text_input: must have no parameters",
    ),
    "shared memory for outputs": (
        changed(
            lambda r: r.outputs[0].parameters["shared_memory_region"].SetInParent(),
            outputs=["text_output"],
        ),
        "outputs: must have no parameters",
    ),
    "an unknown output": (infer_request(outputs=["x"]), "outputs: each must be one of"),
    "many outputs": (infer_request(outputs=["token_ids"] * 99), "outputs: must have at most"),
    "many inputs": (
        changed(lambda r: r.inputs.extend(list(r.inputs) * 99)),
        "inputs: must have at",
    ),
    "a stream": (streamed(), "stream: must be false or left out with ModelInfer"),
    "no JSON": (infer_request(inputs={"sampling_parameters": "{"}), "sampling_parameters: must be"),
    "deep JSON": (
        infer_request(inputs={"sampling_parameters": "[" * 100_000}),
        "sampling_parameters: must be JSON",
    ),
    "a list": (infer_request(inputs={"sampling_parameters": "[]"}), "sampling_parameters: must be"),
    "long JSON": (
        infer_request(inputs={"sampling_parameters": " " * (1 << 19)}),
        "sampling_parameters: must be at most",
    ),
    "an unknown option": (infer_request(foo=1), "sampling_parameters.foo: there is no such option"),
    "an option that is a text": (
        infer_request(**{"my secret": 1}),
        "sampling_parameters: there is no such option",
    ),
    "a prompt among the options": (infer_request(text=None, **{"chat": 1}), "text_input: is req"),
    "what no output shows": (
        infer_request(prompt_logprobs=1),
        "sampling_parameters.prompt_logprobs: there is no such option",
    ),
    "no number": (infer_request(temperature="warm"), "sampling.temperature: must be a number"),
    "a truth for a number": (infer_request(max_tokens=True), "max_tokens: must be a whole number"),
    "a number for a truth": (infer_request(ignore_eos=1), "ignore_eos: must be true or false"),
    "a fraction": (infer_request(top_k=1.5), "sampling.top_k: must be a whole number"),
    "a large number": (
        infer_request(seed=2**64),
        "sampling.seed: must be in [0, 18446744073709551615]",
    ),
    "a vast number": (infer_request(temperature=10**400), "sampling.temperature: must be a finite"),
    "half a character": (infer_request(stop="\ud800"), "stop: must be UTF-8, of whole characters"),
    "no list": (infer_request(stop_token_ids=3), "stop_token_ids: must be an array"),
    "no biases": (infer_request(logit_bias=[1]), "sampling.logit_bias: must be an object"),
    "no mode": (infer_request(speculation={"mode": 3}), "speculation.mode: must be a string"),
    "no speculation": (infer_request(speculation=3), "speculation: must be an object"),
    "an unknown speculation": (infer_request(speculation={"x": 1}), "speculation.x: there is no"),
    "an option twice": (
        infer_request(max_tokens=3, parameters={"max_tokens": 4}),
        "parameters: must not say again",
    ),
    "a range": (infer_request(temperature=9), "sampling.temperature: must be 0 or in"),
    "NaN": (infer_request(temperature=float("nan")), "sampling.temperature: must be a finite"),
    "a long list": (infer_request(stop=["a"] * 99), "stop: must have at most 8 entries"),
    "no time": (
        infer_request(parameters={"timeout": 0}),
        "timeout: must be a whole number of micro",
    ),
    "a long id": (infer_request(name="a" * 129), "id: must be at most 128 characters"),
    "no final": (
        infer_request(parameters={"triton_enable_empty_final_response": 1}),
        "triton_enable_empty_final_response: must be true or false",
    ),
    "an encoder's option": (infer_request(target_language="de"), "target_language: needs a model"),
}


async def test_refusals_name_field_and_rule_and_never_a_value(start):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        for case, (request, told) in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(request, timeout=60)
            error = decode_error(caught.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, case
            assert told in caught.value.details(), case
            assert "secret" not in caught.value.details(), case
        for name, version in (("other", ""), ("letters", "2")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(oip.ModelInferRequest(model_name=name, model_version=version))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        # Refused, they hold nothing.
        assert texts_of(await stub.ModelInfer(infer_request(**GREEDY))) == ["abcdefgh"]


async def test_bytes_that_are_no_message_are_refused(start):
    async with (
        start(serve_options=KSERVE) as run,
        grpc.aio.insecure_channel(run.address) as channel,
    ):
        for method in ("ModelInfer", "ModelReady", "ModelMetadata"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff\xff\xff", timeout=60)
            error = decode_error(caught.value)
            assert error.reason == "MALFORMED_REQUEST", method


async def test_very_many_outputs_are_refused_by_their_number(start):
    async with start(serve_options=KSERVE) as run, stub_of(run.address) as stub:
        for num, rule in (
            (1000, "outputs: must have at most 8 entries"),
            (100_000, "16384 fields"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(infer_request(outputs=["token_ids"] * num))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert rule in refused.value.details()
        # And the next one is served.
        assert texts_of(await stub.ModelInfer(infer_request(**GREEDY)))
