"""Requests of every protocol as bytes: each field of each message with values that fit it and values that do not.

They are drawn once and kept (``requests.jsonl.gz``), so that a later change of this file does not change the judge.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import DecodeError, Message
from outrider.oip import inference_pb2 as oip
from outrider.v1 import inference_pb2 as wire
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.runtime.addons.kserve.requests import infer_request
from tests.runtime.addons.vllm.requests import ask

PROMPT = "abcab"
PER_PROTOCOL = 500
BASE: dict[str, Any] = {"temperature": 0.7, "seed": 11, "max_tokens": 12}
NUMBERS = (0, 1, 1, 2, 2, 3, 3, 5, 7, 64, 65, 1000, 2**31 - 1)
REALS = (
    0.2,
    0.3,
    0.5,
    0.9,
    0.9,
    1.0,
    1.1,
    0.0,
    -0.0,
    0.3,
    1.0,
    -1.0,
    2.5,
    1e-9,
    1e9,
    float("nan"),
    float("inf"),
)
TEXTS = (
    "",
    "a",
    "b",
    "e",
    "abc",
    "z" * 300,
    "ż",
    "[a-c]+",
    '{"type": "object"}',
    'start: "ab"',
    "model",
    "lookup",
    "none",
)
JSONS = (
    None,
    True,
    False,
    0,
    1,
    3,
    -1,
    2.5,
    1e9,
    "",
    "a",
    "abc",
    [],
    ["a"],
    [1, 2],
    [[1]],
    {},
    {"a": 1},
    {"1": 2.0},
)
ROUTES = (
    "/v1/models",
    "/v1/models/letters",
    "/v1/models/other",
    "/health",
    "/version",
    "/v1/none",
    "/tokenize",
    "/detokenize",
)

OPENAI = (
    "prompt", "messages", "stream", "stream_options", "logprobs", "top_logprobs", "suffix", "user", "response_format",
    "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "documents", "functions", "function_call", "guided_json",
    "modalities", "store", "metadata", "service_tier", "reasoning_effort", "prediction", "return_token_ids",
    "use_beam_search", "structured_outputs", "truncate_prompt_tokens", "add_special_tokens",
)  # fmt: skip
HTTP_FIELDS = (
    *OPENAI,
    *wire.Sampling.DESCRIPTOR.fields_by_name,
    *wire.GenerateRequest.DESCRIPTOR.fields_by_name,
)


class Asked(NamedTuple):
    """A request: where it goes, and what of.

    Attributes:
        way: "unary" or "stream" of gRPC's methods, else HTTP's verb.
        method: the full name of gRPC's method, or the path.
        body: the message or the body; the messages of a stream of requests, of which there is one each.
    """

    way: str
    method: str
    body: bytes


def values_of(field: Any) -> Sequence[Any]:
    """Return values for a field of a message that is no message itself."""
    if field.type == Kind.TYPE_BOOL:
        return (True, False)
    if field.type == Kind.TYPE_ENUM:
        return (*sorted(field.enum_type.values_by_number), 99)
    if field.type in (Kind.TYPE_DOUBLE, Kind.TYPE_FLOAT):
        return REALS
    if field.type == Kind.TYPE_STRING:
        return TEXTS
    if field.type == Kind.TYPE_BYTES:
        return (b"", b"\x00\xff")
    signed = field.type in (Kind.TYPE_INT32, Kind.TYPE_INT64, Kind.TYPE_SINT32, Kind.TYPE_SINT64)
    return (*NUMBERS, -1, -7) if signed else NUMBERS


def places(message: Message, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all fields under a message; of messages in themselves, two deep at most."""
    for field in message.DESCRIPTOR.fields:
        here = (*path, field.name)
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or field.is_repeated or is_map or len(here) > 2:
            yield here
        else:
            yield from places(getattr(message, field.name), here)


def put(message: Message, path: Sequence[str], draw: random.Random) -> None:
    """Give a field a drawn value; of a repeated one, some."""
    for name in path[:-1]:
        message = getattr(message, name)
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[one] for one in ("key", "value"))
        held = getattr(message, field.name)
        # One: the order of several differs from process to process.
        if value.message_type is None:
            held[draw.choice(values_of(key))] = draw.choice(values_of(value))
        else:
            part = draw.choice([*value.message_type.fields_by_name])
            put(held[draw.choice(values_of(key))], (part,), draw)
    elif field.message_type is not None and field.is_repeated:
        one = getattr(message, field.name).add()
        for name in field.message_type.fields_by_name:
            put(one, (name,), draw)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).extend(
            draw.choices(values_of(field), k=draw.choice((1, 2, 5)))
        )
    else:
        setattr(message, field.name, draw.choice(values_of(field)))


def json_of(name: str, draw: random.Random) -> Any:
    """Return a JSON value for a field: mostly one of its type, where the wire knows the field."""
    for message in (wire.Sampling, wire.GenerateRequest, wire.Speculation):
        field = message.DESCRIPTOR.fields_by_name.get(name.removeprefix("speculation."))
        if field is not None and field.message_type is None and draw.random() < 0.7:
            value = draw.choice(values_of(field))
            return [value] if field.is_repeated else value
    return draw.choice(JSONS)


def broken(message: Message, draw: random.Random) -> bytes:
    """Return bytes that are no message."""
    data = message.SerializeToString()
    while True:
        found = data[: draw.randrange(len(data) + 1)] if draw.random() < 0.5 else draw.randbytes(40)
        try:
            message.__class__.FromString(found)
        except DecodeError:
            return found


def mutated(
    base: Message, way: str, method: str, count: int, draw: random.Random
) -> Iterator[Asked]:
    """Yield a request with each field drawn at least once, pairs of fields then, and broken bytes among them."""
    yield Asked(way, method, base.SerializeToString())
    found = [*places(base.__class__())]
    for number, path in enumerate(itertools.islice(itertools.cycle(found), count - 1)):
        message = base.__class__()
        message.CopyFrom(base)
        put(message, path, draw)
        if number >= 2 * len(found) and (other := draw.choice(found)) != path:
            put(message, other, draw)
        data = message.SerializeToString()
        if draw.random() < 0.05:
            data = broken(message, draw)
        yield Asked(way, method, data)


def of_outrider(draw: random.Random) -> Iterator[Asked]:
    base = wire.GenerateRequest(text=PROMPT, max_tokens=12)
    base.sampling.temperature, base.sampling.seed = 0.7, 11
    service = "/outrider.v1.Inference/"
    yield from mutated(base, "stream", f"{service}Generate", PER_PROTOCOL - 90, draw)
    yield from mutated(wire.TokenizeRequest(text=PROMPT), "unary", f"{service}Tokenize", 60, draw)
    yield from mutated(wire.AbortRequest(), "unary", f"{service}Abort", 20, draw)
    yield from mutated(wire.GetServerInfoRequest(), "unary", f"{service}GetServerInfo", 10, draw)


def of_vllm(draw: random.Random) -> Iterator[Asked]:
    base = ask(PROMPT, stream=False, **BASE)
    yield from mutated(
        base, "stream", "/vllm.grpc.engine.VllmEngine/Generate", PER_PROTOCOL - 20, draw
    )
    for name, message in (
        ("GetModelInfo", vllm.GetModelInfoRequest()),
        ("HealthCheck", vllm.HealthCheckRequest()),
    ):
        yield from mutated(message, "unary", f"/vllm.grpc.engine.VllmEngine/{name}", 10, draw)


def of_kserve(draw: random.Random) -> Iterator[Asked]:
    service = "/inference.GRPCInferenceService/"
    outputs = ["token_ids", "num_output_tokens"]
    base = infer_request(PROMPT, outputs=outputs, **BASE)
    yield from mutated(base, "unary", f"{service}ModelInfer", 150, draw)
    names = [
        *wire.Sampling.DESCRIPTOR.fields_by_name,
        *wire.GenerateRequest.DESCRIPTOR.fields_by_name,
    ]
    names += [f"speculation.{one}" for one in wire.Speculation.DESCRIPTOR.fields_by_name]
    for number, name in enumerate(itertools.islice(itertools.cycle(names), PER_PROTOCOL - 220)):
        value, (group, _, inner) = json_of(name, draw), name.partition(".")
        options = {**BASE, group: {inner: value} if inner else value}
        message = infer_request(
            PROMPT, outputs=outputs, inputs={"sampling_parameters": json.dumps(options)}
        )
        way, method = ("unary", "ModelInfer") if number % 4 else ("streams", "ModelStreamInfer")
        yield Asked(way, service + method, message.SerializeToString())
    others = (
        ("ServerLive", oip.ServerLiveRequest()), ("ServerReady", oip.ServerReadyRequest()),
        ("ModelReady", oip.ModelReadyRequest(name="letters")), ("ServerMetadata", oip.ServerMetadataRequest()),
        ("ModelMetadata", oip.ModelMetadataRequest(name="letters")),
    )  # fmt: skip
    for name, message in others:
        yield from mutated(message, "unary", service + name, 14, draw)


def of_http(draw: random.Random) -> Iterator[Asked]:
    messages = [{"role": "user", "content": "a"}]
    bases = {
        "/v1/completions": {"model": "letters", "prompt": PROMPT, **BASE},
        "/v1/chat/completions": {"model": "letters", "messages": messages, **BASE},
    }
    for path, base in bases.items():
        for number, name in enumerate(
            itertools.islice(itertools.cycle(HTTP_FIELDS), PER_PROTOCOL // 2 + 20)
        ):
            body = {**base, "return_token_ids": True, name: json_of(name, draw)}
            if number % 5 == 0:
                body["stream"] = True
            if number % 7 == 0:
                other = draw.choice(HTTP_FIELDS)
                body[other] = json_of(other, draw)
            yield Asked("POST", path, json.dumps(body).encode())
    for number, route in enumerate(itertools.islice(itertools.cycle((*ROUTES, *bases)), 40)):
        verb = draw.choice(("GET", "POST", "PUT", "DELETE")) if number > 10 else "GET"
        body = draw.choice(
            (
                b"",
                b"{",
                b"[]",
                b'{"prompt": "abc", "temperature": 0}',
                b'{"tokens": [1, 2]}',
                b"\xff",
            )
        )
        yield Asked(verb, route, b"" if verb == "GET" else body)


def drawn() -> list[Asked]:
    """Return all requests, the same each time."""
    draw = random.Random(0)
    return [*of_outrider(draw), *of_vllm(draw), *of_kserve(draw), *of_http(draw)]
