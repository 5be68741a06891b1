"""Malformed messages, in process and on the wire: each gets a refusal or an answer, and nothing else breaks.

Half of the messages are valid ones with bytes flipped, cut, doubled, inserted and spliced: the parser has to stand
them. The other half are well-formed and hold extreme values in any field: the checks behind it have to stand those.
Some of these are damaged too.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from outrider import Client
from outrider.client import build_request
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.rules import check_abort_ids, check_text
from outrider.runtime.core.errors import ServingError
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.checks import check_request
from outrider.runtime.serving.requests.client import ANONYMOUS
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.requests.spec import Admission, EncodedTexts, build_spec
from outrider.runtime.serving.v1.service import SERVICE
from outrider.runtime.serving.v1.wire import check_tokenize, parse
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.run import check_idle
from scripts.lab.soak.server import running_server
from scripts.lab.soak.verdict import finish

FLOATS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
NUMBERS = (0, 1, 2, 7, 511, 512, 65_535, 2**31 - 1)
EXTREMES: dict[type, Sequence[Any]] = {
    int: (*NUMBERS, -1, -(2**31), 2**32 - 1, 2**63 - 1, 2**64 - 1),
    float: (0.0, -0.0, 1e-320, 1e-9, 0.5, 1.0, 2.0, -1.0, 1e38, math.inf, -math.inf, math.nan),
    str: (
        "",
        "a",
        " ",
        "\x00",
        "\U0010ffff",
        "+",
        "none:3",
        "model/lookup",
        "a" * 300,
        "é" * 600,
        "model+" * 99,
    ),
    bool: (True, False),
}
NUM_CALLS = 32
ANSWER_S = 20.0
"""Seconds that one call may take; a mutated request may ask for thousands of tokens."""
BROKEN = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
LIMITS = RequestLimits()
MODEL = ServedModel(
    name="soak", vocab_size=512, max_context=256, max_gamma=8, eos_token_ids=(1,),
    drafters=("model", "lookup", "suffix", "tree", "auto", "none"), guessers=("lookup",),
    can_adapt=True, max_beams=4, max_token_bytes=16,
)  # fmt: skip
WITH_ENCODER = replace(
    MODEL, max_source=64, source_vocab_size=300, shares_vocabulary=False, banned_token_ids=(0,)
)
DEFAULTS = RequestDefaults(
    search={"num_beams": 2, "early_stopping": True}, sampling={"top_k": 5}, min_tokens=9
)
SEEDS: tuple[tuple[str, Message], ...] = (
    ("Generate", build_request("def main(", max_tokens=1, temperature=0.0, request_id="soak")),
    ("Generate", build_request([3, 4, 5], max_tokens=1, logprobs=2, seed=7, stop=["a", "\n"])),
    ("Generate", build_request("a b", max_tokens=1, logit_bias={3: 1.0, 9: -2.0}, top_k=3, top_p=0.9,
                               bad_words=["x"], min_p=0.1, repetition_penalty=1.2, no_repeat_ngram_size=3)),
    ("Generate", build_request("a", max_tokens=1, source_language="en", target_language="de", answer_prefix="b")),
    ("Generate", build_request([3, 4], max_tokens=1, answer_prefix_tokens=[5, 6])),
    ("Generate", build_request("a", max_tokens=0, echo=True, prompt_logprobs=2)),
    ("Generate", build_request("a", max_tokens=1, num_beams=2, n=2, temperature=0.0, length_penalty=0.5)),
    ("Generate", build_request("a", max_tokens=1, allowed_token_ids=[3, 4], stop_token_ids=[5], return_trace=True,
                               speculation={"drafter": "lookup+model:2", "gamma": 3, "lenience": 0.5})),
    ("Generate", build_request("a", max_tokens=1, speculation={"drafter": "tree", "branching": [2, 1], "mode": 1})),
    ("Generate", build_request(messages=[{"role": "user", "content": "a", "name": "b"}], tools=[{}], max_tokens=1)),
    ("Abort", wire.AbortRequest(request_ids=["a", "soak-1"])),
    ("Tokenize", wire.TokenizeRequest(text="Grüße aus Köln", add_special_tokens=False)),
    ("Tokenize", wire.TokenizeRequest(text="Köln", target=True, source_language="de")),
    ("GetServerInfo", wire.GetServerInfoRequest()),
)  # fmt: skip


def malformed(
    count: int,
    rng: random.Random,
    seeds: Sequence[tuple[str, Message]] = SEEDS,
    with_extremes: Callable[[Message, random.Random], bytes] | None = None,
) -> Iterator[tuple[str, bytes]]:
    """Yield methods and damaged messages; equal generators yield equal ones.

    Args:
        count: of messages.
        rng: for all choices.
        seeds: methods and messages to damage.
        with_extremes: returns a message with extreme values; None for one that sets any field.
    """
    with_extremes = with_extremes or _with_extremes
    whole = [message.SerializeToString() for _, message in seeds]
    for _ in range(count):
        number = rng.randrange(len(seeds))
        method, message = seeds[number]
        is_extreme = rng.random() < 0.5
        data = bytearray(with_extremes(message, rng) if is_extreme else whole[number])
        for _ in range(rng.choice((0, 0, 0, 1)) if is_extreme else rng.randint(1, 3)):
            _damage(data, rng.choice(whole), rng)
        yield method, bytes(data)


def _with_extremes(message: Message, rng: random.Random) -> bytes:
    """Return a message with one to three fields changed, of its parts too."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.randint(1, 3)):
        part: Message = changed
        while part.DESCRIPTOR.fields:
            field = rng.choice(part.DESCRIPTOR.fields)
            kind = field.message_type
            if kind is None or kind.GetOptions().map_entry:
                _set_extreme(part, field, rng)
                break
            inner = getattr(part, field.name)
            part = inner.add() if field.is_repeated else inner
            part.SetInParent()
    return changed.SerializeToString()


def _set_extreme(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    kind = {FieldDescriptor.CPPTYPE_STRING: str, FieldDescriptor.CPPTYPE_BOOL: bool}.get(
        field.cpp_type, float if field.cpp_type in FLOATS else int
    )
    values = EXTREMES[kind]
    try:
        if field.message_type is not None:  # a map, from ids to biases
            getattr(message, field.name)[rng.choice(NUMBERS)] = rng.choice(EXTREMES[float])
        elif field.is_repeated:
            many = (rng.choice(values) for _ in range(rng.choice((1, 2, 40, 400))))
            getattr(message, field.name).extend(many)
        else:
            setattr(message, field.name, rng.choice(values))
    except (ValueError, TypeError):  # out of the field's own range; bytes, and maps of others
        message.ClearField(field.name)


def _damage(data: bytearray, other: bytes, rng: random.Random) -> None:
    at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
    match rng.randrange(6):
        case 0 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:end]
        case 2:
            data[at:at] = data[at:end] * rng.randint(1, 3)
        case 3:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        case 4:
            data[at:end] = other[rng.randint(0, len(other)) :]
        case _:
            data[at:at] = bytes((rng.choice((0x7F, 0x80, 0xFF)),)) * rng.randint(1, 11)


def check(request: wire.GenerateRequest, model: ServedModel, defaults: RequestDefaults) -> None:
    """Refuse, as the request handler does, what cannot be answered; raises ``ServingError``."""
    rules, prompt = RequestRules(LIMITS, model), tuple(request.tokens.ids) or (1, 2)
    check_request(request, defaults.fill(request), rules)
    texts = EncodedTexts(
        prompt=prompt, decoder_prefix=(0, 7) if model.max_source else None, bad_words=((5,),),
        answer_prefix=tuple(request.answer_prefix_tokens.ids),
    )  # fmt: skip
    admission = Admission(internal_id="i", seed=0, deadline_s=1.0, client=ANONYMOUS)
    build_spec(request, texts, admission, rules, defaults)


def judge(method: str, data: bytes, model: ServedModel, defaults: RequestDefaults) -> str:
    """Return the reason for which a message is refused, "OK" where it is not; anything else that is raised is a bug."""
    try:
        if method == "Abort":
            check_abort_ids(parse(wire.AbortRequest, data).request_ids, LIMITS.max_abort_ids)
        elif method == "Tokenize":
            request = parse(wire.TokenizeRequest, data)
            check_text("text", request.text, LIMITS.max_prompt_bytes)
            check_tokenize(
                request, has_encoder=model.max_source > 0, max_messages=LIMITS.max_messages
            )
        elif method == "GetServerInfo":
            parse(wire.GetServerInfoRequest, data)
        else:
            check(parse(wire.GenerateRequest, data), model, defaults)
    except ServingError as error:
        return error.reason
    return "OK"


def in_process(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Judge many damaged messages; the reasons, and what broke."""
    reasons, problems = Counter[str](), list[str]()
    for method, data in malformed(count, random.Random(seed)):
        try:
            reasons[judge(method, data, MODEL, NO_DEFAULTS)] += 1
            reasons[f"with an encoder, {judge(method, data, WITH_ENCODER, DEFAULTS)}"] += 1
        except Exception as error:  # whatever it is, it is what this looks for
            problems.append(f"{method} {data.hex()}: {error!r}")
    return reasons, problems


async def on_the_wire(address: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send many damaged messages to a server; the statuses, and what broke."""
    statuses, problems = Counter[str](), list[str]()
    waiting = malformed(count, random.Random(seed))
    options = (("grpc.enable_retries", 0),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:

        async def one_caller() -> None:
            for method, data in waiting:
                status = await _send(channel, method, data)
                statuses[status.name] += 1
                if status in BROKEN:
                    problems.append(f"{method} {data.hex()}: {status.name}")

        await asyncio.gather(*(one_caller() for _ in range(NUM_CALLS)))
    async with Client(address) as client:
        problems += await check_idle(client)
    return statuses, problems


async def _send(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """Return the status of a call; OK once an answer has begun."""
    path = f"/{SERVICE}/{method}"
    try:
        if method == "Generate":
            call = channel.unary_stream(path)(data, timeout=ANSWER_S)
            await call.read()
            if not call.done():
                call.cancel()
                return grpc.StatusCode.OK
            return await call.code()
        await channel.unary_unary(path)(data, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def main(
    bundle: Path,
    messages: Annotated[int, typer.Option(help="judged in process")] = 1_000_000,
    on_wire: Annotated[int, typer.Option(help="sent to a server process")] = 50_000,
    seed: int = 0,
) -> None:
    """Judge and send malformed messages, and exit 1 where anything but a refusal or an answer comes of one."""
    reasons, problems = in_process(messages, seed)
    with running_server(bundle, "--gamma", "4") as server:
        statuses, broken = asyncio.run(on_the_wire(server.address, on_wire, seed + 1))
    figures = {f"in process: {name}": count for name, count in sorted(reasons.items())}
    figures |= {f"on the wire: {name}": count for name, count in sorted(statuses.items())}
    finish("malformed messages", figures | {"broken": len(problems + broken)}, problems + broken)


if __name__ == "__main__":
    typer.run(main)
