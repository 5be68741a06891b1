"""A ``Generate`` call while it waits: what it keeps of its request."""

from __future__ import annotations

from google.protobuf.message import Message
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.v1.generate_request import V1Request
from outrider.v1 import inference_pb2 as wire

from tests.runtime.freed import Freed


async def test_neither_bytes_nor_message_are_kept(start):
    freed: list[str] = []

    async def send(data: bytes) -> None:
        pass

    request = wire.GenerateRequest(text="abc", return_trace=True, max_tokens=3)
    async with start() as run:
        data = Freed.noting(request.SerializeToString(), freed)
        call = V1Request(run.serving, data, ClientIdentity(), send)
        del data
        assert call.message().text == "abc"
    assert freed == ["freed"]
    assert not any(isinstance(one, Message) for one in vars(call).values())
