"""Messages are counted before they are parsed: a parser is not asked for a million of them."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from outrider.oip import inference_pb2 as oip
from outrider.runtime.core.errors import MalformedRequest
from outrider.runtime.serving.v1.wire import MOST_FIELDS, UNCOUNTED, parse
from outrider.v1 import inference_pb2 as wire

MANY = 1 << 20
LONG = b"a" * UNCOUNTED


def field(number: int, kind: int = 2) -> bytes:
    tag = number << 3 | kind
    return bytes((tag,)) if tag < 128 else bytes((tag & 127 | 128, tag >> 7))


def within(number: int, body: bytes) -> bytes:
    """A field of bytes."""
    size = len(body)
    return (
        field(number)
        + bytes(size >> at & 127 | 128 for at in (0, 7, 14))
        + bytes((size >> 21,))
        + body
    )


BOMBS = {
    "messages": (wire.GenerateRequest, within(30, b"\x0a\x00" * MANY)),
    "messages behind a group": (wire.GenerateRequest, field(9, 3) + field(9, 4) + within(30, b"\x0a\x00" * MANY)),
    "texts": (wire.GenerateRequest, b"\x32\x00" * MANY),
    "numbers": (wire.TokenizeRequest, b"\xf8\x07\x01" * MANY),
    "fixed": (wire.GenerateRequest, (field(9, 1) + bytes(8)) * MANY),
    "inputs": (oip.ModelInferRequest, b"\x2a\x00" * MANY),
    "parameters of an input": (oip.ModelInferRequest, within(5, b"\x22\x00" * MANY)),
    "ids": (wire.AbortRequest, b"\x0a\x00" * MANY),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_of_too_many_fields_is_not_parsed(name: str) -> None:
    kind, data = BOMBS[name]
    assert kind.FromString(data) is not None
    with pytest.raises(MalformedRequest, match="at most 16384 fields"):
        parse(kind, data)


def test_one_field_fewer_is_parsed() -> None:
    most = wire.AbortRequest(request_ids=[LONG.decode()] + [""] * (MOST_FIELDS - 1))
    assert parse(wire.AbortRequest, most.SerializeToString()) == most
    most.request_ids.append("")
    with pytest.raises(MalformedRequest, match="at most"):
        parse(wire.AbortRequest, most.SerializeToString())


def test_what_requests_may_hold_has_fewer() -> None:
    """All limits at once, packed or not."""
    request = wire.GenerateRequest(stop=["a"] * 8, stop_token_ids=range(64), json_schema=LONG)
    for _ in range(1024):
        request.chat.messages.add(role="user", content="a" * 500, fields_json="{}")
    request.sampling.bad_words.extend(["a"] * 64)
    request.sampling.logit_bias.update(dict.fromkeys(range(300), 1.0))
    request.sampling.allowed_token_ids.extend(range(10_000))
    assert parse(wire.GenerateRequest, request.SerializeToString()) == request


@pytest.mark.parametrize("data", [b"\xff" * MANY, within(30, LONG)[:-9], LONG, field(30) + LONG])
def test_what_is_no_message_is_refused_by_the_parser(data: bytes) -> None:
    with pytest.raises(MalformedRequest, match="well-formed"):
        parse(wire.GenerateRequest, data)


def test_short_messages_and_long_lists_are_not_counted() -> None:
    few: Message = wire.AbortRequest(request_ids=[""] * (UNCOUNTED // 2))
    assert parse(wire.AbortRequest, few.SerializeToString()) == few
    ids = wire.GenerateRequest(tokens=wire.TokenIds(ids=[5] * MANY))
    assert parse(wire.GenerateRequest, ids.SerializeToString()) == ids
