"""The same requests through every protocol, of gRPC and over HTTP: the same tokens, one by one."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import grpc.aio
import pytest
from outrider import Client
from outrider.oip import inference_pb2_grpc
from outrider.runtime.serving.settings import ServeOptions
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tests.runtime.addons.kserve import requests as kserve
from tests.runtime.addons.vllm import requests as vllm
from tests.runtime.conftest import EOS, Start
from tests.runtime.grammar import test_serving as constraints
from tests.runtime.serving.chat.test_requests import HELLO, chat_server
from tests.runtime.serving.http.client import Http, serving_http

Tokens = dict[int, list[int]]
"""Of each completion of a prompt, by index."""

PROMPT = "abcab"
# Its own end comes soon.
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 11, "ignore_eos": True}
FORMED: dict[str, Any] = {"temperature": 0.7, "seed": 11, "max_tokens": 80}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "deviations": {**SAMPLED, "top_n_sigma": 1.3},
    "truncated": {**SAMPLED, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
    "penalties": {
        **SAMPLED,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "biased": {**SAMPLED, "logit_bias": {3: 1.7, 5: -2.1}},
    "stopped by a text": {**SAMPLED, "stop": ["s", "e"]},
    "stopped by a token": {**SAMPLED, "stop_token_ids": [7, 9]},
    "to its own end": {"temperature": 1.0, "seed": 8, "max_tokens": 90},
    "several": {**SAMPLED, "n": 3},
    "a schema": {**FORMED, "json_schema": '{"enum": ["ab", 12, {"a": 1}]}'},
    "an expression": {**FORMED, "regex": "[a-f]{8}0*1"},
    "a grammar": {**FORMED, "grammar": 'start: ("ab" | "ba")+ "0"'},
    "log-probabilities": {**SAMPLED, "logprobs": 3},
}


async def of_outrider(client: Client, options: dict[str, Any]) -> Tokens:
    found: Tokens = defaultdict(list)
    async for response in client.generate(PROMPT, **options):
        found[response.index] += [token.id for token in response.tokens]
    return dict(found)


async def of_kserve(channel: grpc.aio.Channel, options: dict[str, Any], *, streams: bool) -> Tokens:
    stub, found = inference_pb2_grpc.GRPCInferenceServiceStub(channel), defaultdict(list)
    make = kserve.streamed if streams else kserve.infer_request
    request = make(PROMPT, outputs=["token_ids", "num_output_tokens"], **options)
    if not streams:
        response = await stub.ModelInfer(request, timeout=60)
        ids = kserve.counts_of(response, "token_ids")
        for index, count in enumerate(kserve.counts_of(response, "num_output_tokens")):
            found[index], ids = ids[:count], ids[count:]
        return dict(found)
    for answer in await kserve.answers_of(stub, request):
        response = answer.infer_response
        index = response.parameters["index"].int64_param
        found[index] += kserve.counts_of(response, "token_ids")
    return dict(found)


async def of_vllm(channel: grpc.aio.Channel, options: dict[str, Any], *, streams: bool) -> Tokens:
    stub, found = vllm_engine_pb2_grpc.VllmEngineStub(channel), defaultdict(list)
    chunks, summaries = await vllm.answers_of(stub, vllm.ask(PROMPT, stream=streams, **options))
    for chunk in chunks:
        found[chunk.index] += chunk.token_ids
    whole = {one.index: list(one.output_ids) for one in summaries}
    assert not streams or found == whole
    return whole


async def of_http(http: Http, options: dict[str, Any], *, streams: bool) -> Tokens:
    asked = {"prompt": PROMPT, "return_token_ids": True, "stream": streams, **options}
    answer, found = await http.complete(**asked), defaultdict(list)
    assert answer.status == 200, answer.body
    parts = answer.events()[:-1] if streams else [answer.json()]
    for choice in [choice for part in parts for choice in part["choices"]]:
        found[choice["index"]] += choice["token_ids"]
    return dict(found)


async def test_every_dialect_answers_with_the_same_tokens(start: Start) -> None:
    both = ServeOptions(has_kserve=True, has_vllm_grpc=True)
    different = set()
    async with (
        serving_http(partial(constraints.starting, start), serve_options=both) as http,
        grpc.aio.insecure_channel(http.running.address) as channel,
    ):
        run = http.running
        for name, asked in REQUESTS.items():
            options = {"max_tokens": 40, **asked}
            expected = await of_outrider(run.client, options)
            assert all(expected.values()) and len(expected) == options.get("n", 1), name
            different.add(str(expected))
            for streams in (False, True):
                assert await of_kserve(channel, options, streams=streams) == expected, name
                if name != "deviations":  # vLLM's wire has no such field
                    assert await of_vllm(channel, options, streams=streams) == expected, name
                assert await of_http(http, options, streams=streams) == expected, name
    # They ask for different things, or the equalities would say little.
    assert len(different) >= len(REQUESTS) - 1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}])
async def test_a_chat_is_rendered_and_answered_alike(start: Start, options: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    async with serving_http(partial(start, **chat_server())) as http:
        client = http.running.client
        output = await client.complete(messages=messages, max_tokens=20, logprobs=2, **options)
        answer = await http.chat(
            messages=messages,
            max_tokens=20,
            return_token_ids=True,
            logprobs=True,
            top_logprobs=2,
            **options,
        )
        (choice,) = answer.json()["choices"]
    tokens = output.outputs[0].token_ids
    assert choice["token_ids"] == [*tokens]
    assert choice["message"]["content"] == output.text
    assert len(choice["logprobs"]["content"]) == len(tokens)


@pytest.mark.parametrize("prompt", [[0, 1, 2], [EOS, 0]])
async def test_token_ids_are_fed_alike(start: Start, prompt: list[int]) -> None:
    async with (
        constraints.starting(start, serve_options=vllm.VLLM_GRPC) as run,
        vllm.stub_of(run.address) as stub,
    ):
        output = await run.client.complete(prompt, max_tokens=20, temperature=0.0)
        _, (summary,) = await vllm.answers_of(stub, vllm.ask(prompt, max_tokens=20))
    assert list(output.outputs[0].token_ids) == list(summary.output_ids)
