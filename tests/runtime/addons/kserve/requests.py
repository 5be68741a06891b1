"""Requests of the Open Inference Protocol, and a client on our own stubs."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from outrider.oip import inference_pb2 as oip
from outrider.oip import inference_pb2_grpc
from outrider.runtime.serving.settings import ServeOptions

KSERVE = ServeOptions(has_kserve=True)


def element(value: str | bool) -> bytes:
    """A tensor of one element, raw."""
    if isinstance(value, bool):
        return bytes([value])
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def infer_request(
    text: str | None = "abc",
    *,
    name: str = "",
    outputs: Sequence[str] = (),
    parameters: dict[str, Any] | None = None,
    inputs: dict[str, str | bool] | None = None,
    **options: Any,
) -> oip.ModelInferRequest:
    """A request of raw tensors, whose options are its sampling parameters."""
    given: dict[str, str | bool] = {} if text is None else {"text_input": text}
    if options:
        given["sampling_parameters"] = json.dumps(options)
    request = oip.ModelInferRequest(model_name="letters", id=name)
    for key, value in {**given, **(inputs or {})}.items():
        datatype = "BOOL" if isinstance(value, bool) else "BYTES"
        request.inputs.add(name=key, datatype=datatype, shape=[1])
        request.raw_input_contents.append(element(value))
    for key in outputs:
        request.outputs.add(name=key)
    for key, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(request.parameters[key], kinds[type(value)], value)
    return request


def streamed(text: str = "abc", **more: Any) -> oip.ModelInferRequest:
    """A request to be answered as the answer is made."""
    return infer_request(text, inputs={"stream": True}, **more)


def texts_of(response: oip.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The elements of an output of texts."""
    raw, at, found = raw_output(response, name), 0, []
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def counts_of(response: oip.ModelInferResponse, name: str) -> list[int]:
    """The elements of an output of numbers."""
    return [number for (number,) in struct.iter_unpack("<I", raw_output(response, name))]


def raw_output(response: oip.ModelInferResponse, name: str) -> bytes:
    names = [one.name for one in response.outputs]
    return response.raw_output_contents[names.index(name)]


@contextlib.asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[inference_pb2_grpc.GRPCInferenceServiceStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


async def answers_of(
    stub: inference_pb2_grpc.GRPCInferenceServiceStub, *requests: oip.ModelInferRequest
) -> list[oip.ModelStreamInferResponse]:
    """All that comes of requests on one stream."""
    return [answer async for answer in stub.ModelStreamInfer(iter(requests), timeout=60)]
