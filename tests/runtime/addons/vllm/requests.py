"""Requests of vLLM's engine protocol, and what comes of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from outrider.runtime.serving.settings import ServeOptions
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

VLLM_GRPC = ServeOptions(has_vllm_grpc=True)


def ask(
    prompt: str | list[int] = "abc", *, name: str = "", stream: bool = True, **params: Any
) -> vllm.GenerateRequest:
    """A request with these sampling parameters, greedy unless they say otherwise."""
    given = {"temperature": 0.0, "max_tokens": 9, **params}
    request = vllm.GenerateRequest(
        request_id=name, stream=stream, sampling_params=vllm.SamplingParams(**given)
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    return request


@contextlib.asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[vllm_engine_pb2_grpc.VllmEngineStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def answers_of(
    stub: vllm_engine_pb2_grpc.VllmEngineStub, request: vllm.GenerateRequest
) -> tuple[list[vllm.GenerateStreamChunk], list[vllm.GenerateComplete]]:
    """The chunks and the summaries that come of a request."""
    answers = [answer async for answer in stub.Generate(request, timeout=60)]
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert kinds[-1] == "complete"
    return (
        [one.chunk for one, kind in zip(answers, kinds, strict=True) if kind == "chunk"],
        [one.complete for one, kind in zip(answers, kinds, strict=True) if kind == "complete"],
    )
